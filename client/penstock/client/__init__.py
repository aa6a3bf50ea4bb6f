"""Python client of the service. It needs only core and httpx.

    with Client(target(None, os.environ, Path.home())) as client:
        job = client.submit(PipelineJob.from_manifest(manifest))
        print(client.wait(Place(name=job.name, namespace=job.namespace)).status.phase)

`AsyncClient` has the same methods as coroutines.
"""

from penstock.client.calls import Past, Place
from penstock.client.clients import AsyncClient, Client
from penstock.client.config import Target, target
from penstock.client.listening import Message
from penstock.client.planning import PlanRequest, ProfileEntry
from penstock.client.types import (
    Artifact,
    Checkpoint,
    Event,
    Export,
    Job,
    JobPlan,
    Line,
    LinePage,
    LoginLink,
    Point,
    Progress,
    Reproduction,
    SampledStep,
    Series,
    ServiceError,
    Status,
    Version,
)

__all__ = [
    "Artifact",
    "AsyncClient",
    "Checkpoint",
    "Client",
    "Event",
    "Export",
    "Job",
    "JobPlan",
    "Line",
    "LinePage",
    "LoginLink",
    "Message",
    "Past",
    "Place",
    "PlanRequest",
    "Point",
    "ProfileEntry",
    "Progress",
    "Reproduction",
    "SampledStep",
    "Series",
    "ServiceError",
    "Status",
    "Target",
    "Version",
    "target",
]
