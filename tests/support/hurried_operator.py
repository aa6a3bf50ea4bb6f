"""An operator that shrinks, grows and replans jobs after seconds instead of minutes: a process runs this module instead
of `penstock.operator`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.core import lifecycle
from penstock.operator import __main__ as program
from penstock.operator.settings import Settings, settings_from

SHRINK_SECONDS, GROW_SECONDS, REPLAN_SECONDS, LOOK_SECONDS = 5.0, 10.0, 10.0, 3.0


def _hurried(environment: Mapping[str, str]) -> Settings:
    return replace(settings_from(environment), resync_seconds=LOOK_SECONDS)


lifecycle.SHRINK_AFTER_NODE_LOST_SECONDS = SHRINK_SECONDS
lifecycle.GROW_AFTER_STABLE_SECONDS = GROW_SECONDS
lifecycle.REPLAN_AFTER_DRIFT_SECONDS = REPLAN_SECONDS
program.settings_from = _hurried  # type: ignore[attr-defined]

if __name__ == "__main__":
    program.main()
