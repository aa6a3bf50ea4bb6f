"""kopf's handlers of the operator. ``memo`` holds the controller and its event loop (`penstock.operator.__main__`).

kopf watches PipelineJobs and reports each event to the controller, which caches the job and enqueues its key; a
reconcile is never a handler (docs/adr/0057). No handler stores anything in an object. An error at the start ends the
run of kopf: otherwise kopf would retry a minute later.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import kopf

from penstock.kube.names import GROUP, VERSION
from penstock.kube.resources import JOBS
from penstock.operator.kopf_settings import configure


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Start the controller, or list all jobs if an earlier run of kopf started it."""
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # kopf would log every event
    configure(settings)
    started = asyncio.run_coroutine_threadsafe(memo.controller.start(memo.background), memo.background)
    await asyncio.wrap_future(started)


@kopf.on.event(GROUP, VERSION, JOBS.plural)
async def enqueue(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Cache the job and enqueue its key if more than its progress has changed."""
    memo.controller.jobs.observe(event["type"], event["object"])


@kopf.on.cleanup(errors=kopf.ErrorsMode.PERMANENT)
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """End the run. The controller goes on: the next run of kopf needs it."""
    memo.stop_flag.set()  # otherwise kopf waits five seconds for its task that waits for this flag
