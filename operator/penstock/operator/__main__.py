"""Starts the operator as its environment configures it: ``penstock-operator``, or ``python -m penstock.operator``.

``penstock-operator check-policy`` lists the jobs that the policy for jobs refuses, and starts nothing.

| variable | meaning |
|---|---|
| PENSTOCK_NAMESPACE | the only namespace whose jobs it handles; all if it is empty |
| PENSTOCK_LOG | ``json`` writes the log as lines of JSON |
| PENSTOCK_POLICY_FILE | the policy for jobs, as the chart's ConfigMap has it; the chart's default without |
| PENSTOCK_LIVENESS_PORT | where ``/healthz`` answers; 8081 |

`penstock.operator.settings` has the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from kopf.cli import main as kopf_main

from penstock.core.errors import UserError
from penstock.kube.connecting import connect
from penstock.kube.transport import KubeError
from penstock.operator.kube import HttpKube
from penstock.operator.policy_check import NUM_CONNECTIONS, report
from penstock.operator.settings import settings_from

CHECK_POLICY = "check-policy"
LIVENESS_PORT = "8081"


def arguments(environment: Mapping[str, str]) -> list[str]:
    """Arguments of kopf."""
    namespace = environment.get("PENSTOCK_NAMESPACE", "")
    port = environment.get("PENSTOCK_LIVENESS_PORT") or LIVENESS_PORT
    return [
        "run",
        "--standalone",
        *(["--namespace", namespace] if namespace else ["--all-namespaces"]),
        "--module=penstock.operator.handlers",
        f"--liveness=http://0.0.0.0:{port}/healthz",
        *(["--log-format=json"] if environment.get("PENSTOCK_LOG") == "json" else []),
    ]


def main() -> None:
    """Run until a signal comes, or check the policy."""
    if sys.argv[1:] == [CHECK_POLICY]:
        sys.exit(_check_policy())
    kopf_main(arguments(os.environ))


def _check_policy() -> int:
    try:
        text, code = report(HttpKube(connect(NUM_CONNECTIONS)), settings_from(os.environ))
    except (UserError, KubeError) as error:
        sys.stderr.write(f"error {error}\n")
        return 2
    sys.stdout.write(text + "\n")
    return code


if __name__ == "__main__":
    main()
