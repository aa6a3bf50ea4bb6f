"""Files of a job, below its name and its uid: checkpoints, their export, and artifacts to download."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Response
from fastapi import Path as InPath
from sqlalchemy import Connection

from penstock.api.files.runfiles import Checkpoint, artifacts, checkpoints, export_folder, open_artifact
from penstock.api.http.dependencies import Editor, JobIn, ServiceIn, by_name
from penstock.api.http.download import MEDIA_TYPE, FilePart
from penstock.api.http.problems import LARGEST_NUMBER, Problem, answers
from penstock.api.http.replies import Once, reply, write_once
from penstock.api.http.run_folder import run_folder
from penstock.api.schemas.runs import ArtifactPage, ArtifactView, CheckpointPage, CheckpointView, ExportView
from penstock.api.schemas.wire import instant
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.api.store.idempotency import Answer
from penstock.api.store.jobs import StoredJob
from penstock.core.run.locations import OUT

router, of_job = APIRouter(tags=["files"]), APIRouter(tags=["files"])

READS = answers("unauthenticated", "forbidden", "not-found", "elsewhere")
Number = Annotated[int, InPath(ge=0, le=LARGEST_NUMBER)]
WHOLE = {
    "description": "The file, or the requested part of it.",
    "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
}
DOWNLOADS: dict[int | str, dict[str, Any]] = {**answers("out-of-range"), **READS, 200: WHOLE, 206: WHOLE}


def _view(service: Service, job: StoredJob, checkpoint: Checkpoint) -> CheckpointView:
    root = run_folder(service.settings, job)
    export = service.exports.of(root, checkpoint.attempt, checkpoint.step)
    folder = export_folder(root, checkpoint.attempt, checkpoint.step).relative_to(root).as_posix()
    return CheckpointView(
        step=checkpoint.step,
        attempt=checkpoint.attempt,
        complete=checkpoint.complete,
        bytes=checkpoint.num_bytes,
        created_at=instant(checkpoint.created_at),
        uri=f"{OUT}{job.uid}/{checkpoint.attempt}/{checkpoint.step}",
        export=None if export is None else ExportView(state=export.state, message=export.message, folder=folder),
    )


@of_job.get("/checkpoints", responses=READS, name="listCheckpoints")
def list_checkpoints(service: ServiceIn, job: JobIn) -> CheckpointPage:
    """The job's checkpoints, newest first, from which other jobs may begin, and which can be exported."""
    root = run_folder(service.settings, job)
    return CheckpointPage(items=[_view(service, job, checkpoint) for checkpoint in checkpoints(root)])


@router.post(
    "/v1/jobs/{namespace}/{name}/checkpoints/{attempt}/{step}/export",
    status_code=202,
    dependencies=[Depends(by_name)],
    response_model=CheckpointView,
    responses=answers("unauthenticated", "forbidden", "not-found", "conflict", "elsewhere", "invalid", "storage-full"),
    operation_id="exportCheckpoint",
)
def export_checkpoint(
    service: ServiceIn, identity: Editor, job: JobIn, attempt: Number, step: Number, keyed: Once
) -> Response:
    """Export a checkpoint as safetensors with its configuration, in the format of transformers.

    The export runs in the background. The list of checkpoints shows its state, and its files become artifacts.
    """
    root = run_folder(service.settings, job)
    known_checkpoint = next(
        (candidate for candidate in checkpoints(root) if (candidate.attempt, candidate.step) == (attempt, step)), None
    )
    if known_checkpoint is None or not known_checkpoint.complete:
        raise Problem(
            kind="not-found",
            detail=f"there is no complete checkpoint {attempt}/{step}",
            where="step",
            remedy="list them with GET .../checkpoints",
        )

    def change(connection: Connection, now: float) -> Answer:
        jobs.add_event(connection, job.uid, "export", {"by": identity.name, "attempt": attempt, "step": step}, now)
        if not service.exports.start(root, attempt, step):
            retry = {"Retry-After": "30"}
            raise Problem(
                kind="unavailable",
                detail="too many exports are waiting",
                remedy="repeat the request after the number of seconds in Retry-After",
                headers=retry,
            )
        return reply(_view(service, job, known_checkpoint), 202)

    return write_once(service, job.uid, keyed, change)


@of_job.get("/artifacts", responses=READS, name="listArtifacts")
def list_artifacts(service: ServiceIn, job: JobIn) -> ArtifactPage:
    """The job's files that can be downloaded: numbers, plan, profile, timelines, logs, exported models."""
    items = [
        ArtifactView(name=artifact.name, bytes=artifact.num_bytes, modified_at=instant(artifact.modified_at))
        for artifact in artifacts(run_folder(service.settings, job))
    ]
    return ArtifactPage(items=items)


@of_job.get(
    "/artifacts/{path:path}",
    status_code=200,
    response_class=Response,
    responses=DOWNLOADS,
    name="downloadArtifact",
)
def download_artifact(
    service: ServiceIn,
    job: JobIn,
    path: Annotated[str, InPath(max_length=1024, description="The artifact's name, slashes and all.")],
    range_: Annotated[str | None, Header(alias="Range", description="One part: bytes=FIRST-LAST.")] = None,
    if_range: Annotated[str | None, Header(description="The ETag of the file that the part belongs to.")] = None,
) -> FilePart:
    """A file, or one part of it. It is always a download, never a page."""
    file = open_artifact(run_folder(service.settings, job), path)
    if file is None:
        raise Problem(
            kind="not-found",
            detail=f"there is no artifact {path!r}",
            where="path",
            remedy="list them with GET .../artifacts",
        )
    try:
        return FilePart(file, path, range_, if_range)
    except Problem:
        file.close()
        raise
