"""Settings of a service: its address, folders, database and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.api.auth.throttle import Rate
from penstock.core.job import PipelineJob
from penstock.core.run.locations import Locations
from penstock.core.schedule import CSV
from penstock.planner.schedules.registry import BUILT_IN

MEBIBYTE = 2**20
REQUESTS = Rate(per_second=100.0, burst=1000)
REVIEWS = Rate(per_second=50.0, burst=500)
INGEST_REQUESTS = Rate(per_second=2000.0, burst=4000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of requests and connections."""

    body_bytes: int = 4 * MEBIBYTE
    decompressed_bytes: int = 32 * MEBIBYTE
    request_seconds: float = 30.0
    idle_seconds: float = 15.0  # to begin a request, or to read some of an answer
    streams: int = 2000
    requests: Rate = REQUESTS  # of a token with its sessions, or an address without one
    ingest_requests: Rate = INGEST_REQUESTS  # one token reports for all jobs of a machine
    reviews: Rate = REVIEWS  # of token reviews by the cluster, from an address
    counted: int = 10_000  # tokens and addresses whose requests are counted
    stream_seconds: float = 300.0  # then a client reconnects, and its token is checked again


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Files of a certificate chain and of its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one service.

    ``hosts`` are the names that it answers to; requests for other hosts are refused (DNS rebinding). ``data_roots`` and
    ``schedules`` are names for jobs beyond the built-in ones (`penstock.core.run.locations`). ``machine`` is the host
    whose measurements are used by default; any if empty. ``executor`` is the name of the executor that runs jobs in
    ``folder``; jobs of another executor have their files elsewhere.
    """

    folder: Path
    database: str = ""
    host: str = "127.0.0.1"
    port: int = 8470
    tls: Tls | None = None
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")
    data_roots: Mapping[str, Path] = field(default_factory=dict)
    schedules: frozenset[str] = frozenset()
    machine: str = ""
    executor: str = ""
    limits: Limits = Limits()

    def answering_to(self, *names: str) -> Settings:
        """Return the settings with more host names."""
        return replace(self, hosts=tuple(dict.fromkeys((*self.hosts, *names))))

    @property
    def url(self) -> str:
        """Base URL of the service."""
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    @property
    def database_url(self) -> str:
        """URL of the database; a file in the folder by default."""
        return self.database or f"sqlite:///{self.folder / 'penstock.db'}"

    @property
    def locations(self) -> Locations:
        """Locations that jobs may name."""
        schedules = frozenset({*BUILT_IN, CSV, *self.schedules})
        return Locations(data_roots=self.data_roots, runs=self.runs, schedules=schedules)

    def executor_for(self, job: PipelineJob) -> str | None:
        """Return the executor that has to run the job, because it has the checkpoint to resume from; none for any."""
        return self.executor or None if job.spec.checkpoint.resume_from else None

    @property
    def runs(self) -> Path:
        """Folder of local jobs, with a folder for each uid."""
        return self.folder / "runs"
