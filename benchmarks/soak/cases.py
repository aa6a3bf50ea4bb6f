"""Inputs of the fuzzer for code that reads foreign data: ConfigMaps, objects of the cluster, plans, schedules.

Each kind has a maker, which returns the input with a number as bytes, and a reader, which passes them to the product's
code. A reader may raise a `PenstockError`, with which the product refuses an input. Any other error is a violation.
"""

from __future__ import annotations

import base64
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.kube.names import PROFILE_FILE
from tests.support import mutating
from tests.support.manifests import FULL, example
from tests.support.sample_run import sample_plan, sample_profile, sample_schedule, sample_timeline
from tests.support.small_plans import small_plan

Read = Callable[[bytes], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of input. ``reading`` sets up its reader for the duration of the block."""

    make: Callable[[random.Random], bytes]
    reading: Callable[[], Any]


def case(kind: str, seed: int, number: int) -> bytes:
    """The input with this number."""
    return KINDS[kind].make(random.Random(f"{seed} {kind} {number}"))


# Makers


def _json(good: Callable[[], Any]) -> Callable[[random.Random], bytes]:
    return lambda chance: mutating.encoded(chance, mutating.document(chance, good()))


def _packed(good: Callable[[], Any]) -> Callable[[random.Random], bytes]:
    """Maker of documents in the form of a ConfigMap: compressed and in base64."""

    def make(chance: random.Random) -> bytes:
        plain = mutating.encoded(chance, mutating.document(chance, good()))
        text = base64.b64encode(mutating.packed(chance, plain))
        return mutating.content(chance, text) if chance.random() < 0.2 else text

    return make


def _yaml(good: Callable[[], Any]) -> Callable[[random.Random], bytes]:
    from penstock.core.serialization import yamltext

    def make(chance: random.Random) -> bytes:
        if chance.random() < 0.5:
            return mutating.encoded(chance, mutating.document(chance, good()))  # JSON is YAML
        return mutating.yaml(chance, yamltext.dump(good())).encode(errors="surrogatepass")

    return make


def _csv(chance: random.Random) -> bytes:
    """A schedule with cells that are missing, duplicated, moved, or that name actions that do not exist."""
    from penstock.planner.order import to_schedule
    from penstock.planner.schedules.registry import find

    shape = {"num_ranks": chance.choice((1, 2, 4)), "num_microbatches": chance.choice((1, 4)), "num_slices": 2}
    name = chance.choice(("gpipe", "1f1b", "zb-h1"))
    rows = [line.split(",") for line in to_schedule(find(name).of_shape(**shape)).to_csv().splitlines()]
    for _ in range(chance.randint(1, mutating.MOST_CHANGES)):
        row = chance.choice(rows)
        at = chance.randrange(len(row))
        row[at] = _cell(chance, row[at])
    plain = "\n".join(",".join(row) for row in rows).encode(errors="surrogatepass")
    return mutating.content(chance, plain) if chance.random() < 0.4 else plain


def _cell(chance: random.Random, cell: str) -> str:
    number = chance.choice((0, 1, 9, 10**6, 10**9, 10**12, 10**18, 10**30, 10**4400 if chance.random() < 0.1 else 3))
    try:
        digits = str(number)
    except ValueError:
        digits = "9" * 4400
    cells: tuple[str, ...] = (
        f"{digits}F0.0", f"0F{digits}.0", f"0F0.{digits}", f"0B{digits}", f"{digits}W0.1", "", cell * 2, cell.lower(),
        f"({cell};{cell})OVERLAP_F_B", "(" * 500 + cell + ")" * 500, "0SEND_F0", "0UNSHARD", "0REDUCE_GRAD", '"',
        f'"{cell}\n"',
        chance.choice(mutating.STRINGS),
    )  # fmt: skip
    return chance.choice(cells)


def _object(good: Callable[[], dict[str, Any]], *parts: str) -> Callable[[random.Random], bytes]:
    """Maker of objects as an API server sends them: only ``parts`` are malformed, and all of it is JSON."""

    def make(chance: random.Random) -> bytes:
        request = good()
        part = chance.choice(parts)
        request[part] = mutating.document(chance, request.get(part) or {})
        return json.dumps(_sendable(request)).encode()

    return make


def _sendable(document: Any) -> Any:
    """The document without values that JSON cannot represent."""
    if isinstance(document, float) and (document != document or abs(document) == float("inf")):
        return None
    if isinstance(document, str):
        return document.encode(errors="replace").decode()
    if isinstance(document, dict):
        return {_sendable(str(name)): _sendable(value) for name, value in document.items()}
    return [_sendable(value) for value in document] if isinstance(document, list) else document


# Readers


@contextmanager
def _file(name: str, read: Callable[[Path], object]) -> Iterator[Read]:
    """Reader of a file with this name."""
    with tempfile.TemporaryDirectory(prefix="penstock-fuzz-") as folder:
        path = Path(folder) / name

        def reader(content: bytes) -> None:
            path.write_bytes(content)
            read(path)

        yield reader


def _schedule_file(path: Path) -> None:
    """Read a schedule like `penstock schedule show FILE`."""
    from penstock.cli.local.schedules import make_schedule, schedule_lines

    schedule_lines(make_schedule(str(path), 0, 0, 0, lambda warning: None))


def _plan_file(path: Path) -> None:
    """Read a plan like a rank, and like the process of `penstock simulate FILE`.

    The size of a rank's Program depends on the plan. It has a maximum, and its memory is the job's own.
    """
    from penstock.core.run.documents import read_plan
    from penstock.planner.compile import program_of
    from penstock.planner.replay import MOST_ACTIONS, num_actions
    from penstock.planner.worker.__main__ import answer
    from penstock.planner.worker.protocol import PlanningRequest

    plan = read_plan(path)
    if num_actions(plan) <= MOST_ACTIONS:
        program_of(plan)
    question = PlanningRequest(spec=_spec(), plan=plan, profile=sample_profile())
    answer(PlanningRequest.from_manifest(json.loads(json.dumps(question.to_manifest()))))


def _spec() -> Any:
    from penstock.core.job import PipelineJob

    return PipelineJob.from_manifest(example()).spec


def _job_file(path: Path) -> None:
    from penstock.cli.local.job_files import read_job
    from penstock.cli.manifests import read_for_service

    read_job(path, lambda warning: None)
    read_for_service(path, lambda warning: None)


def _cluster_file(path: Path) -> None:
    from penstock.cli.manifests import read_cluster

    read_cluster(path)


def _profile_file(path: Path) -> None:
    from penstock.core.run.documents import read_profile
    from penstock.planner.measured import problem_from_profile

    problem_from_profile(_spec(), read_profile(path))


def _timeline_file(path: Path) -> None:
    from penstock.core.run.documents import read_timeline

    read_timeline(path)


def _pod_files(path: Path) -> None:
    """Read an attempt's ConfigMap and annotations like `penstock pod`."""
    from penstock.agent.pod_files import read_job

    read_job(path)


@contextmanager
def _operator_profile() -> Iterator[Read]:
    """The operator reads a profile from a ConfigMap."""
    from penstock.kube.resources import CONFIG_MAPS
    from tests.support.fake_planner import FakePlanner
    from tests.support.operating import Operating

    operating = Operating(FakePlanner())
    config_map: dict[str, Any] = {"metadata": {"name": "measured", "namespace": "default"}, "binaryData": {}}
    operating.kube.add(CONFIG_MAPS, config_map)

    def read(content: bytes) -> None:
        config_map["binaryData"][PROFILE_FILE] = content.decode(errors="replace")
        operating.actions.profile("default", "measured")

    yield read


@contextmanager
def _operator_life() -> Iterator[Read]:
    """The operator reads a job's pods, JobSets, Jobs and nodes from the input. Another job must continue."""
    from tests.support.fuzzed_cluster import Fuzzed

    fuzzed = Fuzzed()
    yield fuzzed.read


@contextmanager
def _service_plan() -> Iterator[Read]:
    """The service mirrors a job whose attempt's ConfigMap has the input. It must mirror another job afterwards."""
    from tests.support.fuzzed_mirror import mirroring

    with mirroring() as mirror:
        yield mirror.read_plan


@contextmanager
def _service_job() -> Iterator[Read]:
    """The service mirrors the input as a PipelineJob and reports to it. It must mirror another job afterwards."""
    from tests.support.fuzzed_mirror import mirroring

    with mirroring() as mirror:
        yield mirror.read_job


def _timeline() -> Any:
    return sample_timeline(sample_schedule(2, 2, 2)).to_manifest()


def _full() -> dict[str, Any]:
    from penstock.core.serialization import yamltext

    manifest: dict[str, Any] = yamltext.load(FULL)
    return manifest


def _cluster() -> dict[str, Any]:
    from penstock.api.schemas.bodies import EXAMPLE_CLUSTER

    return EXAMPLE_CLUSTER


def _pipeline_job() -> dict[str, Any]:
    """A running PipelineJob as a cluster stores it."""
    from tests.support.fuzzed_mirror import good_job

    return good_job()


def _cluster_object() -> dict[str, Any]:
    from tests.support.fuzzed_cluster import good_object

    return good_object()


KINDS: Mapping[str, Kind] = {
    "schedule file": Kind(make=_csv, reading=lambda: _file("schedule.csv", _schedule_file)),
    "plan file": Kind(make=_json(lambda: small_plan().to_manifest()), reading=lambda: _file("plan.json", _plan_file)),
    "large plan file": Kind(
        make=_json(lambda: sample_plan().to_manifest()), reading=lambda: _file("plan.json", _plan_file)
    ),
    "job file": Kind(make=_yaml(_full), reading=lambda: _file("job.yaml", _job_file)),
    "cluster file": Kind(make=_yaml(_cluster), reading=lambda: _file("cluster.yaml", _cluster_file)),
    "profile file": Kind(
        make=_json(lambda: sample_profile().to_manifest()), reading=lambda: _file("profile.json", _profile_file)
    ),
    "timeline file": Kind(make=_json(_timeline), reading=lambda: _file("timeline.json", _timeline_file)),
    "pod's job": Kind(make=_json(example), reading=lambda: _file("job.json", _pod_files)),
    "operator: profile ConfigMap": Kind(
        make=_packed(lambda: sample_profile().to_manifest()), reading=_operator_profile
    ),
    "operator: pods and status": Kind(make=_json(_cluster_object), reading=_operator_life),
    "service: plan ConfigMap": Kind(make=_packed(lambda: small_plan().to_manifest()), reading=_service_plan),
    "service: PipelineJob": Kind(make=_object(_pipeline_job, "spec", "status"), reading=_service_job),
}
