"""Starts the operator as its environment asks: ``penstock-operator``, or ``python -m penstock.operator``.

| variable | meaning |
|---|---|
| PENSTOCK_NAMESPACE | the only namespace whose jobs it sees to; all if it is empty |
| PENSTOCK_LOG | ``json`` writes the log as lines of JSON |
| PENSTOCK_LIVENESS_PORT | where ``/healthz`` answers; 8081 |

`penstock.operator.settings` has the others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from kopf.cli import main as kopf_main

LIVENESS_PORT = "8081"


def arguments(environment: Mapping[str, str]) -> list[str]:
    """What kopf is told."""
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
    """Run until a signal comes."""
    kopf_main(arguments(os.environ))


if __name__ == "__main__":
    main()
