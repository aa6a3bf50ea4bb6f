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

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack

import kopf

from penstock.core.errors import UserError
from penstock.core.host.clocks import SlewedClock
from penstock.kube.connecting import connect
from penstock.kube.transport import KubeError
from penstock.operator import (
    handlers,  # noqa: F401, the import registers the handlers with kopf
    health,
    metrics,
)
from penstock.operator.controller import controller_from
from penstock.operator.kopf_runs import KopfRuns, background_loop
from penstock.operator.kube import HttpKube
from penstock.operator.policy_check import NUM_CONNECTIONS, report
from penstock.operator.settings import METRICS_VARIABLE, port_of, settings_from

CHECK_POLICY = "check-policy"
LIVENESS_PORT = 8081
LIVENESS_VARIABLE = "PENSTOCK_LIVENESS_PORT"


def main() -> None:
    """Run until a signal comes, or check the policy. A mistake in the configuration is two lines, and exit code 2."""
    try:
        if sys.argv[1:] == [CHECK_POLICY]:
            text, code = report(HttpKube(connect(NUM_CONNECTIONS)), settings_from(os.environ))
            sys.stdout.write(text + "\n")
            sys.exit(code)
        if sys.argv[1:]:
            remedy = f"run penstock-operator without arguments, or penstock-operator {CHECK_POLICY}"
            raise UserError(what=f"no such command: {' '.join(sys.argv[1:])[:60]!r}", remedy=remedy)
        require_startable(os.environ)
    except (UserError, KubeError) as error:
        sys.stderr.write(f"error {error}\n")
        sys.exit(2)
    operate(os.environ)


def operate(environment: Mapping[str, str]) -> None:
    """Run the controller, and kopf with the handlers, until a signal comes. Then finish reconciles in flight.

    The probe and the metrics are served all the time, because runs of kopf may end one after the other.
    """
    is_json = environment.get("PENSTOCK_LOG") == "json"
    kopf.configure(log_format=kopf.LogFormat.JSON if is_json else kopf.LogFormat.FULL)
    settings = settings_from(environment)
    port = port_of(environment, LIVENESS_VARIABLE, LIVENESS_PORT)
    controller = controller_from(settings, SlewedClock())
    with background_loop() as background, ExitStack() as servers:
        if port:
            servers.callback(health.serve(controller.probe, port))
        if settings.metrics_port:
            servers.callback(metrics.serve(controller.registry, settings.metrics_port))
        memo = kopf.Memo(controller=controller, background=background)

        async def run_kopf(stop_flag: asyncio.Event) -> None:
            memo.stop_flag = stop_flag
            await kopf.operator(
                memo=memo,
                standalone=True,
                clusterwide=not settings.namespace,
                namespaces=[settings.namespace] if settings.namespace else [],
                stop_flag=stop_flag,
            )

        runs = KopfRuns(run_kopf)
        controller.jobs.on_unwatched = runs.restart
        try:
            runs.run()
        finally:
            asyncio.run_coroutine_threadsafe(controller.close(), background).result()


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


if __name__ == "__main__":
    main()
