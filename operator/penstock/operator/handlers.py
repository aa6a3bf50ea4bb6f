"""The operator's process: ``kopf run -m penstock.operator.handlers``.

kopf runs the process: it starts the controller, answers the liveness probe, and ends on signals. It watches nothing
itself (docs/adr/0023). All wiring is here. An error at the start ends the process, and an error in a probe fails it at
once: otherwise kopf would retry a minute later, and the probe would wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import kopf

from penstock.core.host.clocks import SlewedClock
from penstock.operator.controller import Controller, controller_from
from penstock.operator.metrics import serve
from penstock.operator.settings import settings_from

PROBE_LOG = "kopf.activities.probe"


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Start the metrics server and the controller, and wait for the controller's first sync."""
    logging.getLogger(PROBE_LOG).setLevel(logging.WARNING)  # or every probe would be logged
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.networking.request_timeout = 20
    settings_read = settings_from(os.environ)
    memo.controller = controller_from(settings_read, SlewedClock())
    if settings_read.metrics_port:
        memo.close_metrics = serve(memo.controller.registry, settings_read.metrics_port)
    await memo.controller.start(asyncio.get_running_loop())


@kopf.on.cleanup(errors=kopf.ErrorsMode.PERMANENT)
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Finish reconciles in flight, and stop the metrics server."""
    await memo.controller.close()
    if "close_metrics" in memo:
        memo.close_metrics()


@kopf.on.probe(id="watches", errors=kopf.ErrorsMode.PERMANENT)
async def watches(memo: kopf.Memo, **_: Any) -> Any:
    """Seconds since the last answer of each watch; fails when one is stuck."""
    controller: Controller = memo.controller
    return controller.watch_ages()
