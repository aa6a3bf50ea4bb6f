"""The operator's process: ``kopf run -m penstock.operator.handlers``. Handlers tell the cache and the queue, no more.

kopf keeps the process: it logs in, watches PipelineJobs, answers the liveness probe, and ends on signals. Everything is
wired here and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import kopf

from penstock.kube.names import GROUP, JOB_PLURAL, VERSION
from penstock.operator.operation import Operation, operation_from

log = logging.getLogger(__name__)


@kopf.on.startup()
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Make the operation, and wait until it knows everything there is."""
    settings.posting.enabled = False
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # or every event of a watch would be told
    settings.watching.server_timeout = 290
    settings.watching.connect_timeout = 10
    settings.networking.request_timeout = 20
    memo.operation = operation_from(time.time)
    await memo.operation.start(asyncio.get_running_loop())


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Finish what is in flight."""
    await memo.operation.close()


@kopf.on.event(GROUP, VERSION, JOB_PLURAL)
async def job_changed(type: str | None, body: kopf.Body, memo: kopf.Memo, **_: Any) -> None:  # noqa: A002, kopf's name
    """A PipelineJob came, changed or went."""
    operation: Operation = memo.operation
    if type == "DELETED":
        operation.cache.remove_job(body["metadata"]["uid"])
    else:
        operation.cache.put_job(dict(body))


@kopf.on.probe(id="watches")
def watches(memo: kopf.Memo, **_: Any) -> Any:
    """How long each watch was silent; fails when one is stuck."""
    operation: Operation = memo.operation
    return operation.silences()
