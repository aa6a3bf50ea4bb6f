"""Schemas about planning: plan requests, and profiles."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from penstock.api.schemas.jobs import SpeedView
from penstock.api.schemas.wire import Wire, instant, maybe
from penstock.api.store.plan_requests import PlanInput, State, StoredRequest
from penstock.api.store.profiles import StoredProfile
from penstock.core.layout import Precision
from penstock.core.model import UnitKind
from penstock.core.plan import Plan
from penstock.core.profile import LinkRecord, Profile
from penstock.core.profile_matching import OLDEST_SECONDS
from penstock.core.schedule import Kind
from penstock.planner.pricing import cost_of, run_time_of
from penstock.planner.worker.protocol import Progress


class SearchView(Wire):
    """Progress of the search."""

    divisions: int = Field(
        description="Number of outlines that were opened: meshes, each with a number of slices and a schedule."
    )
    candidates: int = Field(description="Number of simulated plans.")
    best: str = Field(description="Best plan so far that fits; empty before the first.")
    best_step_seconds: float | None
    best_speed: SpeedView | None = Field(description="Speed of a step of the best plan.")
    change: str = Field(description="Change that this search covers, in a request with `whatIf`; else empty.")


class MistakeView(Wire):
    """Reason why there is no plan."""

    what: str
    where: str = Field(
        description="Field with the mistake, if there is one.", examples=["spec.resources.memoryPerRank"]
    )
    remedy: str


class PlanRequestRow(Wire):
    """A plan request, in lists."""

    id: str
    namespace: str
    name: str = Field(description="Name of the planned job.")
    state: State
    created_by: str
    created_at: datetime
    finished_at: datetime | None
    progress: SearchView
    error: MistakeView | None
    plan_digest: str | None


class CostView(Wire):
    """Costs of a run with a plan, in the currency of the price."""

    per_hour: float = Field(description="Cost of an hour of all devices that the plan uses.")
    per_million_tokens: float
    whole_job: float = Field(description="Cost of all steps of the job, by their predicted duration.")


class RunTimeView(Wire):
    """Predicted time of all steps of the job."""

    seconds: float
    interruptions: float = Field(
        description="Expected interruptions; 0 without `resources.spot` or on measured hardware."
    )
    interruption_seconds: float = Field(description="Part of `seconds` for restarts and repeated steps.")


class PlanRequestView(PlanRequestRow):
    """A plan request, and its plan after success."""

    job: dict[str, Any] = Field(description="The submitted PipelineJob.")
    profile: str | None = Field(description="Digest of the profile that the plan is based on.")
    cluster: dict[str, Any] | None = Field(description="The described hardware that the plan is for.")
    plan: dict[str, Any] | None = Field(description="The Plan in its manifest form, with reasons and alternatives.")
    run_time: RunTimeView | None
    cost: CostView | None = Field(
        description="Cost by the price of each device (`pricePerHour`, or `spotPricePerHour` for a job with "
        "`resources.spot`), else by the job's `pricePerDeviceHour`. null if no price is known."
    )


class PlanRequestPage(Wire):
    """Plan requests, newest first."""

    items: list[PlanRequestRow]


class ProfileRow(Wire):
    """A profile, in lists."""

    digest: str
    key: str = Field(description="Cache key of machine, software, model, precision and ranks.")
    host: str
    device: str
    model_digest: str
    precision: Precision
    num_ranks: int
    method: str = Field(description="Method of the measurement.")
    measured_at: datetime
    age_seconds: float
    fresh: bool = Field(description="Whether jobs are planned by it: the newest of its key, and less than a week old.")


class ProfilePage(Wire):
    """Profiles, newest first."""

    items: list[ProfileRow]


class LayerView(Wire):
    """Costs of a pass of a unit, for a micro-batch and a slice after a prefix."""

    unit: UnitKind
    kind: Kind
    batch: int = Field(description="Sequences.")
    length: int = Field(description="Tokens of the slice.")
    prefix: int = Field(description="Tokens before it.")
    alone_seconds: float = Field(description="The mean with the other ranks idle, without the slowest twentieth.")
    together_seconds: float = Field(description="The mean with all ranks computing, without the slowest twentieth.")
    spread: float = Field(description="The interquartile range over the mean.")
    samples: int
    held_out: bool = Field(description="Whether it tests the fit and takes no part in it.")
    tp: int = Field(description="Shards of the unit, of which this is one's pass.")
    head_parts: int = Field(description="Units that the head is divided into, of which this is one's pass; else 1.")


Matrix = list[list[float | None]]


class LinksView(Wire):
    """Links as matrices: row by the sending rank, column by the receiving one; null where nothing was measured."""

    latency_seconds: Matrix
    bytes_per_second: Matrix
    error: Matrix = Field(description="The mean absolute relative error of the fit to latency + bytes / bandwidth.")


class TransientView(Wire):
    """Memory of a pass of a unit beyond its slots."""

    unit: UnitKind
    kind: Kind
    batch: int
    length: int
    prefix: int
    num_bytes: int
    tp: int = Field(description="Shards of the unit, of which these are one's bytes.")
    head_parts: int = Field(description="Units that the head is divided into, of which these are one's bytes; else 1.")


class MemoryView(Wire):
    """Memory of a rank."""

    constant_bytes: int = Field(description="Memory of the process without parameters.")
    transients: list[TransientView]


class ProfileView(ProfileRow):
    """Everything that was measured."""

    layers: list[LayerView]
    links: LinksView
    memory: MemoryView
    profile: dict[str, Any] = Field(description="The Profile in its manifest form.")


def request_row(stored: StoredRequest) -> PlanRequestRow:
    """Return the request's row in lists."""
    progress = Progress.from_manifest(stored.progress)
    return PlanRequestRow(
        id=stored.id,
        namespace=stored.namespace,
        name=stored.name,
        state=stored.state,
        created_by=stored.created_by,
        created_at=instant(stored.created_at),
        finished_at=maybe(stored.finished_at),
        progress=SearchView.model_validate(progress),
        error=None if not stored.error else MistakeView(**stored.error),
        plan_digest=stored.plan_digest,
    )


def request_view(stored: StoredRequest, plan_input: PlanInput, plan: Plan | None) -> PlanRequestView:
    """Return the view of a plan request."""
    spec, cluster = plan_input.job.spec, plan_input.cluster
    cost = None if plan is None else cost_of(plan, spec, cluster)
    run_time = None if plan is None else run_time_of(plan, spec, cluster)
    return PlanRequestView(
        **request_row(stored).model_dump(by_alias=False),
        job=plan_input.job.to_manifest(),
        profile=plan_input.profile,
        cluster=None if plan_input.cluster is None else plan_input.cluster.to_manifest(),
        plan=None if plan is None else plan.to_manifest(),
        run_time=None if run_time is None else RunTimeView.model_validate(run_time),
        cost=None if cost is None else CostView.model_validate(cost),
    )


def profile_row(stored: StoredProfile, now: float) -> ProfileRow:
    """Return the profile's row in lists."""
    age = now - stored.measured_at
    return ProfileRow(
        digest=stored.digest,
        key=stored.key,
        host=stored.host,
        device=stored.device,
        model_digest=stored.model_digest,
        precision=stored.precision,
        num_ranks=stored.num_ranks,
        method=stored.method,
        measured_at=instant(stored.measured_at),
        age_seconds=age,
        fresh=stored.newest and age <= OLDEST_SECONDS,
    )


def profile_view(stored: StoredProfile, profile: Profile, now: float) -> ProfileView:
    """Return the view of a profile."""
    links = profile.links
    return ProfileView(
        **profile_row(stored, now).model_dump(by_alias=False),
        layers=[LayerView.model_validate(unit) for unit in profile.units],
        links=LinksView(
            latency_seconds=_matrix(links, profile.num_ranks, "latency_seconds"),
            bytes_per_second=_matrix(links, profile.num_ranks, "bytes_per_second"),
            error=_matrix(links, profile.num_ranks, "error"),
        ),
        memory=MemoryView.model_validate(profile.memory),
        profile=profile.to_manifest(),
    )


def _matrix(links: tuple[LinkRecord, ...], num_ranks: int, name: str) -> Matrix:
    value_by_link = {(link.source, link.target): getattr(link, name) for link in links}
    return [[value_by_link.get((source, target)) for target in range(num_ranks)] for source in range(num_ranks)]
