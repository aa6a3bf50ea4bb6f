"""kopf's handlers of the operator. ``memo`` holds the controller and its event loop (`penstock.operator.__main__`).

kopf watches PipelineJobs and reports each event to the controller, which caches the job and enqueues its key; a
reconcile is never a handler (docs/adr/0057). No handler stores anything in an object. An error at the start ends the
run of kopf, and an error in a probe fails it at once: otherwise kopf would retry a minute later, and the probe would
wait.
"""

from __future__ import annotations

import logging
from typing import Any

import kopf

from penstock.core.job import API_VERSION
from penstock.kube.resources import JOBS
from penstock.operator.kopf_settings import configure
from penstock.operator.metrics import serve

GROUP, VERSION = API_VERSION.split("/")
QUIET_LOGS = ("kopf.objects", "kopf.activities.probe", "aiohttp.access")
"""kopf would log every event, and every probe twice."""


@kopf.on.startup(errors=kopf.ErrorsMode.PERMANENT)
async def start(settings: kopf.OperatorSettings, memo: kopf.Memo, **_: Any) -> None:
    """Start the controller, or list all jobs if an earlier run of kopf started it, and serve the metrics."""
    for name in QUIET_LOGS:
        logging.getLogger(name).setLevel(logging.WARNING)
    configure(settings)
    await memo.background.run(memo.controller.start(memo.background.loop))
    if memo.metrics_port:
        memo.close_metrics = serve(memo.controller.registry, memo.metrics_port)


@kopf.on.event(GROUP, VERSION, JOBS.plural)
async def enqueue(event: kopf.RawEvent, memo: kopf.Memo, **_: Any) -> None:
    """Cache the job and enqueue its key if more than its progress has changed."""
    memo.controller.jobs.observe(event["type"], event["object"])


@kopf.on.cleanup(errors=kopf.ErrorsMode.PERMANENT)
async def stop(memo: kopf.Memo, **_: Any) -> None:
    """Stop the metrics server. The controller goes on: the next run of kopf needs it."""
    memo.stop_flag.set()  # kopf waits five seconds for the task that waits for it
    if close_metrics := memo.pop("close_metrics", None):
        close_metrics()


@kopf.on.probe(id="watches", errors=kopf.ErrorsMode.PERMANENT)
async def watches(memo: kopf.Memo, **_: Any) -> Any:
    """Seconds since the last answer of each watch; fails when one is stuck."""
    return memo.controller.watch_ages()
