"""The operator's process: ``kopf run -m penstock.operator.handlers``. Handlers tell the cache and the queue, no more.

kopf keeps the process: it logs in, watches PipelineJobs, answers the liveness probe, and ends on signals. Everything is
wired here and nowhere else. What fails at the start ends the process, and what fails in a probe fails it at once: kopf
would try again a minute later otherwise, and let whoever asked wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any

import kopf

from penstock.kube.names import GROUP, JOB_PLURAL, VERSION
from penstock.operator.metrics import serve
from penstock.operator.operation import Operation, operation_from
from penstock.operator.settings import settings_from

log = logging.getLogger(__name__)

QUIET = ("kopf.objects", "kopf.activities.probe")
"""Or every event of a watch and every probe would be told."""


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Make the operation, and wait until it knows everything there is."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.watching.server_timeout = 290
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 20
    told = settings_from(os.environ)
    memo.operation = operation_from(told, time.time)
    if told.metrics_port:
        memo.close_metrics = serve(memo.operation.registry, told.metrics_port)
    await memo.operation.start(asyncio.get_running_loop())


@kopf.on.cleanup(errors=kopf.ErrorsMode.PERMANENT)
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Finish what is in flight."""
    await memo.operation.close()
    if "close_metrics" in memo:
        memo.close_metrics()


@kopf.on.event(GROUP, VERSION, JOB_PLURAL)
async def job_changed(type: str | None, body: kopf.Body, memo: kopf.Memo, **_: Any) -> None:  # noqa: A002, kopf's name
    """A PipelineJob came, changed or went."""
    operation: Operation = memo.operation
    if type == "DELETED":
        operation.cache.remove_job(body["metadata"]["uid"])
    else:
        operation.cache.put_job(dict(body))


@kopf.on.probe(id="watches", errors=kopf.ErrorsMode.PERMANENT)
async def watches(memo: kopf.Memo, **_: Any) -> Any:
    """How long nothing was heard of each watch; fails when one is stuck."""
    operation: Operation = memo.operation
    return operation.silences()
