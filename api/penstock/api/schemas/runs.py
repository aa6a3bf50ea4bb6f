"""Schemas about a job's files and its reproduction."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from penstock.api.files.exporting import ExportState
from penstock.api.schemas.wire import Wire


class ExportView(Wire):
    """A checkpoint as a model for other programs."""

    state: ExportState
    message: str = Field(description="Cause of a failure.")
    folder: str = Field(description="Prefix of its files among the artifacts.", examples=["exports/a1-step-50"])


class CheckpointView(Wire):
    """A checkpoint of a job."""

    step: int
    attempt: int
    complete: bool = Field(description="False while it is written or deleted.")
    bytes: int
    created_at: datetime
    uri: str = Field(description="Value for `resumeFrom` of another job.", examples=["out://UID/1/50"])
    export: ExportView | None = Field(description="State of its export; null if none was requested.")


class CheckpointPage(Wire):
    """Checkpoints, newest first."""

    items: list[CheckpointView]


class ArtifactView(Wire):
    """A file of a job."""

    name: str = Field(examples=["metrics.jsonl", "exports/a1-step-50/model.safetensors"])
    bytes: int
    modified_at: datetime


class ArtifactPage(Wire):
    """Files, by name."""

    items: list[ArtifactView]


class RetryRequest(Wire):
    """Input for a retry."""

    name: str | None = Field(
        default=None, max_length=63, description="Name of the new job; the old name with a number if left out."
    )


class ReproductionView(Wire):
    """Manifest, versions and commands that repeat a run of a job."""

    manifest: dict[str, Any] = Field(description="The PipelineJob, with its plan pinned if there was one.")
    plan_digest: str | None = Field(description="Digest of the pinned plan; null if the job never had one.")
    versions: dict[str, str] = Field(description="Versions of the packages that the run used, as far as known.")
    commands: list[str] = Field(description="Shell commands, in order.")
