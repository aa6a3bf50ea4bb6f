"""Entry point of the operator, which its environment configures: ``penstock-operator``.

``penstock-operator check-policy`` lists the jobs that the policy for jobs refuses, and starts nothing.

| variable | meaning |
|---|---|
| PENSTOCK_NAMESPACE | the only namespace whose jobs the operator handles; all namespaces if empty |
| PENSTOCK_LOG | ``json`` writes every log line as a JSON object |
| PENSTOCK_POLICY_FILE | the file with the policy for jobs, from the chart's ConfigMap; the chart's default if unset |
| PENSTOCK_LIVENESS_PORT | port of ``/healthz``; 8081 by default |

`penstock.operator.settings` has the others.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

from kopf.cli import main as kopf_main

from penstock.core.errors import UserError
from penstock.kube.connecting import connect
from penstock.kube.transport import KubeError
from penstock.operator.kube import HttpKube
from penstock.operator.policy_check import NUM_CONNECTIONS, report
from penstock.operator.settings import METRICS_VARIABLE, port_of, settings_from

CHECK_POLICY = "check-policy"
LIVENESS_PORT = 8081
LIVENESS_VARIABLE = "PENSTOCK_LIVENESS_PORT"


def arguments(environment: Mapping[str, str]) -> list[str]:
    """Return the arguments of kopf."""
    namespace = environment.get("PENSTOCK_NAMESPACE", "")
    port = port_of(environment, LIVENESS_VARIABLE, LIVENESS_PORT)
    return [
        "run",
        "--standalone",
        *(["--namespace", namespace] if namespace else ["--all-namespaces"]),
        "--module=penstock.operator.handlers",
        f"--liveness=http://0.0.0.0:{port}/healthz",
        *(["--log-format=json"] if environment.get("PENSTOCK_LOG") == "json" else []),
    ]


def main() -> None:
    """Run until a signal comes, or check the policy. A mistake in the configuration is two lines, and exit code 2."""
    try:
        if sys.argv[1:] == [CHECK_POLICY]:
            sys.exit(_check_policy())
        if sys.argv[1:]:
            remedy = f"run penstock-operator without arguments, or penstock-operator {CHECK_POLICY}"
            raise UserError(what=f"no such command: {' '.join(sys.argv[1:])[:60]!r}", remedy=remedy)
        require_startable(os.environ)
    except (UserError, KubeError) as error:
        sys.stderr.write(f"error {error}\n")
        sys.exit(2)
    kopf_main(arguments(os.environ))


def require_startable(environment: Mapping[str, str]) -> None:
    """Raise `UserError` for a configuration that the operator cannot start with.

    kopf would report the same error with a traceback for each of its tasks.
    """
    metrics_port = settings_from(environment).metrics_port
    liveness_port = port_of(environment, LIVENESS_VARIABLE, LIVENESS_PORT)
    connect(NUM_CONNECTIONS)
    for variable, port in ((LIVENESS_VARIABLE, liveness_port), (METRICS_VARIABLE, metrics_port)):
        if port:
            _require_free(variable, port)


def _require_free(variable: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            remedy = f"stop the process that listens there, or set {variable} to a free port"
            raise UserError(what=f"port {port}: {error.strerror}", where=variable, remedy=remedy) from None


def _check_policy() -> int:
    text, code = report(HttpKube(connect(NUM_CONNECTIONS)), settings_from(os.environ))
    sys.stdout.write(text + "\n")
    return code


if __name__ == "__main__":
    main()
