"""Answers about a job's files, and about its reproduction."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from penstock.api.files.exporting import ExportState
from penstock.api.schemas.wire import Wire


class ExportView(Wire):
    """A checkpoint as a model for other programs."""

    state: ExportState
    message: str = Field(description="Why it failed.")
    folder: str = Field(description="Its files are the artifacts below this name.", examples=["exports/a1-step-50"])


class CheckpointView(Wire):
    """A model after so many steps."""

    step: int
    attempt: int
    complete: bool = Field(description="False while it is written, or removed.")
    bytes: int
    created_at: datetime
    uri: str = Field(description="Value for `resumeFrom` of another job.", examples=["out://UID/1/50"])
    export: ExportView | None = Field(description="Null if none was requested.")


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
    """How the new job is called."""

    name: str | None = Field(default=None, max_length=63, description="The old name with a number, if left out.")


class ReproductionView(Wire):
    """The means to repeat a run of a job."""

    manifest: dict[str, Any] = Field(description="The PipelineJob, with its plan pinned if it had one.")
    plan_digest: str | None = Field(description="Of the plan that is pinned; null if the job never had one.")
    versions: dict[str, str] = Field(description="Of the packages that it ran with, as far as they are known.")
    commands: list[str] = Field(description="One after the other, to be pasted into a shell.")
