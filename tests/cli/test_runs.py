"""Starting and resuming: what is checked before anything starts, and where runs lie."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.agent.local_launch import local_launches
from penstock.agent.profiles import Profiles
from penstock.agent.run_state import read_state
from penstock.cli.local import runs
from penstock.core.capacity import Demand, Machine
from penstock.core.errors import UserError
from penstock.core.host.launches import Holding
from penstock.core.host.machine_capacity import this_machine
from penstock.core.lifecycle import Phase
from penstock.core.run.folder import RunDir
from penstock.core.run.lock import locked
from tests.support.fake_workers import FakeWorkers, Script, killed, refused
from tests.support.local_run import finished_run, local_identity, local_job, local_plan, local_profile

PINNED = {"pp": 2, "microBatch": 1, "slices": 4}


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache and a working directory of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def machine(workers: FakeWorkers | None = None) -> runs.LocalMachine:
    """The machine that was measured, with scripted workers."""
    return runs.LocalMachine(
        workers=lambda devices: workers or FakeWorkers(),
        identify=lambda spec, devices: local_identity(local_job()),
        clock=lambda: local_profile().measured_at,
    )


def job(**changes: Any) -> Any:
    return local_job(**{"training__steps": 12, "checkpoint": {"everySteps": 5}, "parallelism": PINNED, **changes})


def test_a_run_leaves_everything_in_its_directory(tmp_path: Path) -> None:
    ended = runs.start(job(), tmp_path / "r", None, machine())
    assert ended.state.phase is Phase.SUCCEEDED
    assert ended.signal is None
    run = RunDir(tmp_path / "r")
    assert run.read_job() == job()
    assert len(run.read_plan().slices) == 4
    assert [entry.step for entry in run.read_metrics()] == list(range(12))
    assert read_state(run.root) == ended.state


def test_runs_without_a_directory_are_numbered(tmp_path: Path) -> None:
    for number in ("1", "2"):
        ended = runs.start(job(), None, None, machine())
        assert ended.run.root == tmp_path / "runs" / "stdlib-llama" / number
    (tmp_path / "runs" / "stdlib-llama" / "notes").mkdir()
    (tmp_path / "runs" / "stdlib-llama" / "17").mkdir()
    assert runs.next_folder("stdlib-llama").name == "18"


def test_a_plan_laid_out_beforehand_is_obeyed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create()
    finished = finished_run(tmp_path / "other")
    run.plan.write_text(finished.plan.read_text())
    workers = FakeWorkers()
    runs.start(job(parallelism={}), run.root, None, machine(workers))
    assert run.read_plan() == local_plan()
    assert workers.started == ["prepare", "train 1 on 2"]


def test_a_second_run_needs_no_measurement(tmp_path: Path) -> None:
    first, second = FakeWorkers(), FakeWorkers()
    runs.start(job(), tmp_path / "a", None, machine(first))
    _keep_measurements(tmp_path)
    runs.start(job(), tmp_path / "b", None, machine(second))
    assert "profile 1" in first.started
    assert "profile 1" not in second.started


def _keep_measurements(root: Path) -> None:
    """The scripted workers leave a profile that lacks micro-batches; keep one that has them all."""
    identity = local_identity(local_job())
    Profiles(root / "cache" / "penstock" / "profiles").keep(local_profile(), identity)


def test_a_failed_run_is_resumed_as_a_new_attempt(tmp_path: Path) -> None:
    failing = FakeWorkers(scripts=[Script(until=7, end=killed(step=7))])
    ended = runs.start(job(runPolicy__backoffLimit=0), tmp_path / "r", None, machine(failing))
    assert ended.state.phase is Phase.FAILED
    workers = FakeWorkers()
    ended = runs.resume(tmp_path / "r", None, machine(workers))
    assert (ended.state.phase, ended.state.attempt) == (Phase.SUCCEEDED, 2)
    assert workers.started == ["prepare", "train 2 on 2"]


def test_a_signal_is_reported(tmp_path: Path) -> None:
    script = Script(end=None, before=lambda: os.kill(os.getpid(), signal.SIGTERM))
    ended = runs.start(job(), tmp_path / "r", None, machine(FakeWorkers(scripts=[script])))
    assert ended.state.phase is Phase.SUSPENDED
    assert ended.signal == signal.SIGTERM


# Next to other launches


def test_a_run_holds_its_part_of_the_machine_while_it_goes_on(tmp_path: Path) -> None:
    held: list[Holding] = []
    script = Script(before=lambda: held.extend(local_launches().holdings()))
    runs.start(job(), tmp_path / "r", None, machine(FakeWorkers(scripts=[script])))
    assert [(holding.pid, holding.what, holding.cores) for holding in held] == [
        (os.getpid(), f"run directory {tmp_path / 'r'}", 2)
    ]
    assert local_launches().holdings() == []


def test_a_run_that_does_not_fit_next_to_another_names_it(tmp_path: Path) -> None:
    """It leaves nothing, and goes on once the other has ended. So does one that is resumed."""
    whole = Demand(cores=this_machine(os.environ).cores)
    workers = FakeWorkers()
    with local_launches().held("run directory /elsewhere", whole):
        mistake = mistake_of(lambda: runs.start(job(), tmp_path / "r", None, machine(workers)))
        assert f"process {os.getpid()} (run directory /elsewhere) holds" in mistake.what
        assert f"2 cores of which 0 of {whole.cores} are free" in mistake.what
        assert not (tmp_path / "r").exists()
    failing = FakeWorkers(scripts=[Script(until=7, end=killed(step=7))])
    runs.start(job(runPolicy__backoffLimit=0), tmp_path / "r", None, machine(failing))
    with local_launches().held("run directory /elsewhere", whole):
        mistake_of(lambda: runs.resume(tmp_path / "r", None, machine(workers)))
    assert workers.started == []
    assert runs.resume(tmp_path / "r", None, machine()).state.phase is Phase.SUCCEEDED


def test_runs_use_devices_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes and profile are for the devices that are free."""
    machine = Machine(cores=64, memory_bytes=2**40, devices=("0", "1", "2", "3", "4"))
    monkeypatch.setattr("penstock.agent.local_launch.this_machine", lambda environment: machine)
    given: list[tuple[str, ...]] = []

    def workers(devices: tuple[str, ...]) -> FakeWorkers:
        given.append(devices)
        return FakeWorkers()

    def identified(spec: Any, devices: tuple[str, ...]) -> Any:
        given.append(devices)
        return local_identity(local_job())

    local = runs.LocalMachine(workers=workers, identify=identified, clock=lambda: local_profile().measured_at)
    cuda = job(resources__device="cuda")
    with local_launches().held("another", Demand(cores=2, cuda_devices=2)) as taken:
        assert taken == ("0", "1")
        assert runs.start(cuda, tmp_path / "a", None, local).state.phase is Phase.SUCCEEDED
        assert given[0] == (), "whether there are devices at all"
        assert set(given[1:]) == {("2", "3")}
        with local_launches().held("a third", Demand(cores=2, cuda_devices=2)):
            mistake = mistake_of(lambda: runs.start(cuda, tmp_path / "b", None, local))
    assert "2 CUDA devices of which 1 of 5 are free" in mistake.what


# Mistakes


def mistake_of(call: Any) -> UserError:
    with pytest.raises(UserError) as found:
        call()
    assert found.value.remedy
    return found.value


def test_a_directory_with_a_run_is_not_begun_again(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "r")
    mistake = mistake_of(lambda: runs.start(job(), run.root, None, machine()))
    assert f"penstock resume {run.root}" in mistake.remedy


def test_a_run_that_never_trained_may_be_begun_again(tmp_path: Path) -> None:
    script = Script(until=0, end=refused("no", "yes"))
    with pytest.raises(UserError):
        runs.start(job(), tmp_path / "r", None, machine(FakeWorkers(scripts=[script])))
    assert runs.start(job(), tmp_path / "r", None, machine()).state.phase is Phase.SUCCEEDED


def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "r")
    mistake = mistake_of(lambda: runs.resume(run.root, None, machine()))
    assert "finished" in mistake.what
    assert "training.steps" in mistake.remedy


def test_a_run_that_failed_after_its_last_step_is_resumed(tmp_path: Path) -> None:
    """Its last checkpoint may be corrupt, or only the end of the run is missing."""
    steps = job().spec.training.steps
    failing = FakeWorkers(scripts=[Script(until=steps, end=refused("a1/step-12 is corrupt", "resume"))])
    with pytest.raises(UserError, match="is corrupt"):
        runs.start(job(checkpoint={"everySteps": steps}), tmp_path / "r", None, machine(failing))
    assert runs.resume(tmp_path / "r", None, machine()).state.phase is Phase.SUCCEEDED


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.create()
    with locked(run.root):
        assert "in use" in mistake_of(lambda: runs.start(job(), run.root, None, machine())).what
        run.job.write_text((finished_run(tmp_path / "o").job).read_text())
        assert "in use" in mistake_of(lambda: runs.resume(run.root, None, machine())).what


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    mistake = mistake_of(lambda: runs.start(job(), tmp_path / "file" / "r", None, machine()))
    assert str(tmp_path / "file" / "r") in mistake.where


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        workers = FakeWorkers()
        mistake = mistake_of(lambda: runs.start(job(), tmp_path / "r", port, machine(workers)))
    assert str(port) in mistake.what
    assert mistake.where == "--metrics-port"
    assert workers.started == []


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"data__source": "data://corpus"}, "spec.data.source"),
        ({"data__tokenizer": {"file": "models://t"}, "model__vocab": 300}, "spec.data.tokenizer.file"),
        ({"checkpoint": {"resumeFrom": "out://c"}}, "spec.checkpoint.resumeFrom"),
        ({"checkpoint": {"resumeFrom": "/nowhere/step-5"}}, "spec.checkpoint.resumeFrom"),
    ],
)
def test_what_is_not_here_is_named_before_anything_starts(tmp_path: Path, changes: dict[str, Any], place: str) -> None:
    workers = FakeWorkers()
    assert mistake_of(lambda: runs.start(job(**changes), tmp_path / "r", None, machine(workers))).where == place
    assert workers.started == []
    assert not (tmp_path / "r").exists()


def test_memory_that_never_suffices_says_what_would_and_leaves_no_folder(tmp_path: Path) -> None:
    """Its ranks were started and measured by then, and the next run begins with what they measured."""
    workers, root = FakeWorkers(), tmp_path / "runs" / "r"
    mistake = mistake_of(lambda: runs.start(job(resources__memoryPerRank="100Mi"), root, None, machine(workers)))
    assert mistake.where == "spec.resources.memoryPerRank"
    assert "allow" in mistake.remedy
    assert workers.started
    assert not (tmp_path / "runs").exists()


def test_a_pinned_plan_that_cannot_be_says_so(tmp_path: Path) -> None:
    pinned = {**PINNED, "stages": [1, 2, 5]}
    mistake = mistake_of(lambda: runs.start(job(parallelism=pinned), tmp_path / "r", None, machine()))
    assert mistake.where.startswith("spec.parallelism")


def test_a_missing_device_is_named_before_data_is_prepared(tmp_path: Path) -> None:
    def refusing(spec: Any, devices: tuple[str, ...]) -> Any:
        raise UserError(what="no NVIDIA device is here", where="spec.resources.device", remedy="write device: cpu")

    workers = FakeWorkers()
    machine = runs.LocalMachine(workers=lambda devices: workers, identify=refusing)
    cuda = job(resources__device="cuda")
    for root in (None, tmp_path / "r"):
        mistake = mistake_of(lambda root=root: runs.start(cuda, root, None, machine))
        assert mistake.where == "spec.resources.device"
    assert workers.started == []
    assert not (tmp_path / "r").exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kept", [(), ("notes.txt",)])
def test_a_run_that_is_refused_before_its_first_attempt_leaves_no_folder(tmp_path: Path, kept: tuple[str, ...]) -> None:
    """But a directory that was there stays, with what was in it."""
    for name in kept:
        (tmp_path / "runs" / "r").mkdir(parents=True)
        (tmp_path / "runs" / "r" / name).touch()

    def refuse() -> None:
        raise UserError(what="holds no text", where="spec.data.source", remedy="name another folder")

    workers = FakeWorkers(prepare_with=refuse)
    mistake = mistake_of(lambda: runs.start(job(), tmp_path / "runs" / "r", None, machine(workers)))
    assert mistake.where == "spec.data.source"
    assert (tmp_path / "runs").exists() == bool(kept)
    assert all((tmp_path / "runs" / "r" / name).exists() for name in kept)


def test_more_memory_than_the_machine_has_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = runs.LocalMachine(
        workers=lambda devices: FakeWorkers(),
        identify=lambda spec, devices: local_identity(local_job()),
        clock=lambda: local_profile().measured_at,
        memory_bytes=3 * 2**30,
    )
    runs.start(job(resources__memoryPerRank="2Gi"), tmp_path / "r", None, machine)
    told = " ".join(capsys.readouterr().err.split())
    assert "spec.resources.memoryPerRank: 2 ranks may take 2 GiB each, and this machine has 3 GiB" in told
    runs.start(job(resources__memoryPerRank="1Gi"), tmp_path / "s", None, machine)
    assert "may take" not in capsys.readouterr().err
