"""Ranks of a pod: where they start, what they are called, and how long a result is waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.agent import pod_workers
from penstock.agent.launch import LaunchSpec, Nodes
from penstock.agent.pod_workers import PodWorkers
from penstock.core.errors import RunError, UserError
from penstock.core.job import Device
from penstock.core.pod import MEASURES_LABEL, PodBinding
from penstock.core.preparing import SILENT
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from tests.support.fake_workers import FakeRanks, Script
from tests.support.small_plans import small_plan
from tests.support.supervised import sample_job

PLACE = PodBinding(
    pod_uid="p", attempt=2, epoch=1, node_rank=1, num_nodes=2, ranks_per_pod=2, master="10.0.0.1", port=29400
)


def ranks() -> FakeRanks:
    return FakeRanks(Script(), lambda: False, lambda outcome: None)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    specs: list[LaunchSpec] = []

    def launch(spec: LaunchSpec) -> FakeRanks:
        specs.append(spec)
        return ranks()

    monkeypatch.setattr(pod_workers, "launch", launch)
    return specs


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run", tmp_path / "run" / "hosts" / "p", tmp_path / "disk")
    made.create()
    return made


def workers(place: PodBinding | None = PLACE) -> PodWorkers:
    return PodWorkers(lambda: place, Path("/cache"))


def test_a_job_that_only_measures_has_no_data(run: RunDir, tmp_path: Path) -> None:
    """What it names is not looked for; of any other job it would be."""
    job = sample_job()
    away = replace(job, spec=replace(job.spec, data=replace(job.spec.data, source=str(tmp_path / "nowhere"))))
    with pytest.raises(UserError, match="nowhere"):
        workers().prepare(away, run, SILENT)
    workers().prepare(replace(away, metadata=replace(away.metadata, labels={MEASURES_LABEL: "pool"})), run, SILENT)
    assert not run.data.exists()


def test_ranks_start_for_the_job_s_device(run: RunDir, launched: list[LaunchSpec]) -> None:
    job = sample_job()
    cuda = replace(job, spec=replace(job.spec, resources=replace(job.spec.resources, device=Device.CUDA)))
    workers().profile(cuda, run, 2)
    assert [spec.device for spec in launched] == [Device.CUDA]


def test_measuring_ranks_are_devices(run: RunDir, launched: list[LaunchSpec]) -> None:
    workers().profile(sample_job(), run, 2)
    (spec,) = launched
    assert (spec.num_ranks, spec.ranks) == (2, (2, 3))
    assert spec.nodes == Nodes(node_rank=1, num_nodes=2, master="10.0.0.1", port=29401)
    assert spec.arguments == (
        *("profile", "--run-dir", str(run.root)),
        *("--host-dir", str(run.host), "--local-dir", str(run.local)),
    )
    assert (spec.log_folder, spec.status_folder) == (run.logs / "a2-profile", run.status)


@pytest.mark.parametrize(
    ("placement", "names"),
    [((), (2, 3)), ((0, 2, 1, 3), (1, 3)), ((3, 2, 1, 0), (1, 0))],
)
def test_training_ranks_are_where_the_plan_puts_them(
    run: RunDir, launched: list[LaunchSpec], placement: tuple[int, ...], names: tuple[int, ...]
) -> None:
    write_json(run.plan, small_plan(pp=4).to_manifest() | ({"placement": list(placement)} if placement else {}))
    workers().train(sample_job(), run, 2, 4, None)
    (spec,) = launched
    assert spec.ranks == names
    assert spec.arguments[-3:] == ("--attempt", "2", "--over-hosts")


@pytest.mark.parametrize(
    ("tp", "placement", "names"), [(2, [], (2, 3)), (2, [2, 0], (0, 1)), (4, [0], (2, 3)), (4, [4], (6, 7))]
)
def test_shards_are_on_the_devices_after_their_first(
    run: RunDir, launched: list[LaunchSpec], tp: int, placement: list[int], names: tuple[int, ...]
) -> None:
    """Over several pods too, where a placement says so."""
    place = replace(PLACE, num_nodes=4)
    placed = {"placement": placement} if placement else {}
    write_json(run.plan, small_plan(pp=4 // tp).to_manifest() | {"tp": tp} | placed)
    workers(place).train(sample_job(), run, 2, 4, None)
    assert launched[0].ranks == names


def test_shards_are_not_put_on_several_pods_by_chance(run: RunDir, launched: list[LaunchSpec]) -> None:
    write_json(run.plan, small_plan(pp=1).to_manifest() | {"tp": 4})
    with pytest.raises(UserError, match=r"plan.tp: puts ranks 0 to 3, .* on pods 0 to 1, which have 2 each") as caught:
        workers().train(sample_job(), run, 2, 4, None)
    assert "make kubernetes.ranksPerPod a multiple of 4, or pin parallelism.tp to a divisor of 2" in caught.value.remedy
    assert launched == []


def test_devices_without_work_have_ranks_beyond(run: RunDir, launched: list[LaunchSpec]) -> None:
    write_json(run.plan, {**small_plan(pp=2).to_manifest(), "placement": [3, 1]})
    workers().train(sample_job(), run, 2, 2, None)
    assert launched[0].ranks == (3, 0)


def test_a_plan_for_more_devices_is_refused(run: RunDir, launched: list[LaunchSpec]) -> None:
    write_json(run.plan, {**small_plan(pp=2).to_manifest(), "placement": [4, 1]})
    with pytest.raises(UserError, match="device 4, but there are only 4"):
        workers().train(sample_job(), run, 2, 2, None)
    assert launched == []


def test_a_binding_that_was_taken_back_starts_nothing(run: RunDir, launched: list[LaunchSpec]) -> None:
    with pytest.raises(RunError, match="lost its binding"):
        workers(None).profile(sample_job(), run, 2)
    assert launched == []


def test_data_is_prepared_where_all_pods_find_it(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("penstock.trainer.prepare.prepare_data", lambda *given, cache: asked.append(cache))
    workers().prepare(sample_job(), run, SILENT)
    assert asked == [Path("/cache")]


def test_training_waits_for_the_result_that_another_pod_writes(run: RunDir, launched: list[LaunchSpec]) -> None:
    write_json(run.plan, small_plan(pp=2).to_manifest())
    workers().profile(sample_job(), run, 2)
    workers().train(sample_job(), run, 2, 2, None)
    assert [spec.result for spec in launched] == [None, run.result]
