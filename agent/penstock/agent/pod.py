"""Program of a pod of an attempt: the supervisor with the pod's mailbox, on storage that all pods share.

Exit codes: 0 succeeded or stopped, 1 failed, 2 a mistake of the user.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.agent.endpoint import AgentFiles
from penstock.agent.pod_files import PodFiles, PodFolders, read_job
from penstock.agent.pod_mailbox import PodMailbox
from penstock.agent.pod_workers import PodWorkers
from penstock.agent.process_tree import offspring_ended
from penstock.agent.stalling import RankSteps
from penstock.agent.supervisor import Supervisor
from penstock.agent.workers import Workers
from penstock.core.errors import UserError
from penstock.core.host.stopping import listening
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import AttemptState
from penstock.core.pod import JOB_FILE, PodBinding, termination_message
from penstock.core.records import RecordKind
from penstock.core.run.folder import RunDir
from penstock.core.run.locations import Locations
from penstock.core.run.outbox import Outbox
from penstock.core.schedule import ScheduleSpec
from penstock.core.supervision import AttemptReport

PROFILE_SOURCE = "profile"

FAILED, REFUSED = 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Pod:
    """Folders and files of a pod; ``data`` holds a folder for each root of ``data://``."""

    folders: PodFolders
    files: PodFiles
    data: Path


class PodDecider:
    """Measures on every request. The pod of the first rank serves the profile to the operator by its agent, and sends
    it to the service as a record.
    """

    def __init__(
        self, job: PipelineJob, run: RunDir, attempt: int, place: Callable[[], PodBinding | None], agent: AgentFiles
    ) -> None:
        self._job, self._run, self._attempt, self._place = job, run, attempt, place
        self._agent = agent

    def find_profile(self) -> bool:
        return False

    def keep_profile(self) -> None:
        place = self._place()
        if place is None or place.node_rank != 0:
            return
        uid, profile = self._job.metadata.uid, self._run.read_profile()
        self._agent.measured(profile)
        box = Outbox(self._run.outbox, uid=uid, attempt=self._attempt, source=PROFILE_SOURCE, clock=time.time)
        with contextlib.closing(box):
            box.put(RecordKind.PROFILE, profile=profile)


def lay_out(pod: Pod) -> tuple[PipelineJob, RunDir]:
    """Return the job with paths of this pod, and the run directory; raises `UserError` if either is unusable."""
    job = located(read_job(pod.files.attempt / JOB_FILE), pod)
    run = pod.folders.run(job)
    root, checkpoints = run.root, run.root.parent / "checkpoints"
    with _writable(root):
        for folder in (root, checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            run.checkpoints.symlink_to(Path("..", checkpoints.name), target_is_directory=True)
    run.create()
    with _writable(root):
        run.write_job(job)
    return job, run


def located(job: PipelineJob, pod: Pod) -> PipelineJob:
    """Return the job with paths of this pod. Its schedule file is not needed: the planner has read it."""
    pinned = job.spec.parallelism.schedule
    name = pinned.generator if isinstance(pinned, ScheduleSpec) else pinned
    roots = {folder.name: folder for folder in pod.data.glob("*") if folder.is_dir()}
    places = Locations(
        data_roots=roots,
        runs=pod.folders.out,
        schedules=frozenset({name} if name else ()),
        place="the job's volumes",
        remedy="add its claim to spec.kubernetes.volumes in a new job",
    )
    return places.resolved(job, readable=lambda uid: True)


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            what=f"cannot be written: {error.strerror}",
            where=f"output storage {folder}",
            remedy="use a claim that the pods' user 65532 may write: kubectl describe pvc shows its mode and class",
        ) from None


def run_pod(
    pod: Pod,
    say: Callable[[str], None],
    make_workers: Callable[[Callable[[], PodBinding | None], Path], Workers] = PodWorkers,
) -> int:
    """Run a pod of an attempt until its end; return the exit code."""
    with listening() as requests:
        try:
            job, run = lay_out(pod)
            agent = AgentFiles(pod.folders, job.metadata.uid, run)
            mailbox = PodMailbox(pod.files, run, pod.folders.uid, pod.folders.attempt, say=say, agent=agent)
            workers = make_workers(lambda: mailbox.place, run.root.parent / "data")
            decider = PodDecider(job, run, pod.folders.attempt, lambda: mailbox.place, agent)
            with offspring_ended():
                report = Supervisor(
                    job,
                    run,
                    pod.folders.attempt,
                    mailbox,
                    workers=workers,
                    decider=decider,
                    requests=requests,
                    steps=lambda run: RankSteps(run.status),
                    graceful=True,
                ).run()
        except Exception as error:
            report = AttemptReport(state=AttemptState.FAILED, message=str(error), refused=isinstance(error, UserError))
            pod.files.termination.write_text(termination_message(report))
            say(str(error))
    if report.state is not AttemptState.FAILED:
        return 0
    return REFUSED if report.refused else FAILED
