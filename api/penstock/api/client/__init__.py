"""Asking a service from Python. Needs core and httpx alone.

with Client(target(None, os.environ, Path.home())) as client:
    job = client.submit(PipelineJob.from_manifest(manifest))
    print(client.wait(Place(job.name)).status.phase)
"""

from penstock.api.client.asynchronous import AsyncClient
from penstock.api.client.calls import Place
from penstock.api.client.config import Target, target
from penstock.api.client.planning import PlanRequest, ProfileEntry
from penstock.api.client.sync import Client
from penstock.api.client.types import Event, Job, Progress, ServiceError, Status

__all__ = [
    "AsyncClient",
    "Client",
    "Event",
    "Job",
    "Place",
    "PlanRequest",
    "ProfileEntry",
    "Progress",
    "ServiceError",
    "Status",
    "Target",
    "target",
]
