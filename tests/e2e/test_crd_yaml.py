"""The same YAML read by kubectl, the apiserver, the service and the command line.

kubectl knows version 1.1 with Go's ways, penstock 1.2. Every difference there is stands in a table below, and in
docs/guides/kubernetes.md; none changes a value without a word.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from penstock.api.auth.identity import Role
from penstock.cli.local.job_files import read_job
from penstock.core.errors import UserError
from penstock.core.job import JobSpec, PipelineJob
from penstock.core.serialization import yamltext
from tests.support.cluster import COLD_SECONDS, Cluster
from tests.support.kubectl import Kubectl, kubectl_of, with_crds
from tests.support.manifests import EXAMPLE
from tests.support.service import Clock, client_of, new_service

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

HEAD = "apiVersion: penstock.dev/v1alpha1\nkind: PipelineJob\nmetadata: {name: a}\n"
REFUSED = object()
NUMBERS = itertools.count()

SCALARS = [
    *("1e-3", "1.0e-3", "1e3", "1E3", "1e+3", "1.e3", ".5", "+.5", "5.", "1.0", "0.1", "+5", "-0", "1_000", "1e10"),
    *("0o17", "0x1F", "0b11", "9007199254740993", "true", "True", "TRUE", "tRue", "~", "null", "Null", ""),
    *("4Gi", "1:30", "2026-01-31", "2026-01-31T12:00:00Z", "=", "'yes'", "'1e-3'", "1e", "0o8"),
]
"""Read the same by both."""

DIFFERENT: dict[str, tuple[Any, Any]] = {
    # text -> penstock, kubectl
    **{text: (text, True) for text in ("yes", "Yes", "on", "y")},
    **{text: (text, False) for text in ("no", "No", "off", "n")},
    "017": (REFUSED, 15),
    "08": (REFUSED, 8),
    ".inf": (float("inf"), REFUSED),
    ".nan": (float("nan"), REFUSED),
    "1e400": (float("inf"), "1e400"),
    "12345678901234567890": (12345678901234567890, 12345678901234567000),
    "0X1F": ("0X1F", 31),
}


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Kubectl:
    return with_crds(kubectl_of(cluster))


def by_kubectl(kubectl: Kubectl, text: str) -> Any:
    done = kubectl.run("create", "--dry-run=client", "--validate=false", "-o", "json", "-f", "-", text=HEAD + text)
    return json.loads(done.stdout)["spec"] if done.returncode == 0 else REFUSED


def by_penstock(text: str) -> Any:
    try:
        return yamltext.load(HEAD + text)["spec"]
    except UserError:
        return REFUSED


def test_what_both_read_the_same(kubectl: Kubectl) -> None:
    text = "spec: {" + ", ".join(f"k{i}: {scalar}" for i, scalar in enumerate(SCALARS)) + "}\n"
    assert by_penstock(text) == by_kubectl(kubectl, text)


@pytest.mark.parametrize("scalar", DIFFERENT)
def test_what_they_read_differently(kubectl: Kubectl, scalar: str) -> None:
    ours, theirs = DIFFERENT[scalar]
    text = f"spec: [{scalar}]\n"
    read = by_penstock(text)
    assert read is ours or repr(read) == repr([ours])
    read = by_kubectl(kubectl, text)
    assert read is theirs or repr(read) == repr([theirs])


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.text("0123456789-+.:_eExXobTZ yYnNofFOn~=<aB", max_size=8) | st.text(max_size=6), max_size=200))
def test_what_penstock_writes_kubectl_reads(kubectl: Kubectl, texts: list[str]) -> None:
    written = yamltext.dump({"spec": texts})
    assert by_kubectl(kubectl, written) == texts


# One change to a whole job, read by all of them

SAME = [
    ("steps: 200", ["steps: 2e2", "steps: 200.0", "steps: 0xC8", "steps: 0o310", "steps: 2_00"]),
    ("clip: 1.0", ["clip: 1", "clip: .5", "clip: 5.", "clip: 1e-1"]),
    ("memoryPerRank: 4Gi", [f"memoryPerRank: {text}" for text in ("4294967296", "4.5Gi", "4G", "4GiB", "' 4 Gi'")]),
    ("objective: time", ["objective: 'time'", "objective: !!str time"]),
    ("seed: 0", ["seed: -0", "seed: -7"]),
]
NOWHERE = [
    ("steps: 200", [f"steps: {text}" for text in ("'200'", "2.5", ".inf", ".nan", "1e400", "~", "yes", "0", "[200]")]),
    ("suspend: false", ["suspend: 'no'", "suspend: 0", "suspend: 'false'"]),
    ("memoryPerRank: 4Gi", [f"memoryPerRank: {text}" for text in ("4 gigs", "-1", "1.5", "true", "4gi")]),
    ("family: llama", ["family: no", "family: Llama"]),
    ("clip: 1.0", ["clip: -1", "clip: one", "clip: .inf"]),
    ('image: ""', ["image: 7", "image: 017"]),
]
ONLY_KUBECTL = [
    ("suspend: false", ["suspend: no", "suspend: off", "suspend: n"]),
    ("steps: 200", ["steps: 0310"]),
    ("clip: 1.0", ["clip: ~"]),
]
"""What kubectl takes and penstock refuses: words for true and false, octal numbers, and null for "the default"."""
ONLY_PENSTOCK = [
    ('image: ""', ["image: yes", "image: n"]),
    ("name: stdlib-llama", ["name: stdlib-llama, labels: {a: no}"]),
]
"""What penstock takes for a string and kubectl for true or false, which is none."""


def cases(table: list[tuple[str, list[str]]]) -> list[str]:
    assert all(EXAMPLE.count(old) == 1 for old, _ in table)
    return [EXAMPLE.replace(old, new) for old, changes in table for new in changes]


def named(table: list[tuple[str, list[str]]]) -> list[str]:
    return [new for _, changes in table for new in changes]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    service = new_service(tmp_path_factory.mktemp("service"), clock=Clock())
    with client_of(service, Role.ADMIN) as found:
        yield found
    service.close()


def by_apiserver(kubectl: Kubectl, text: str) -> JobSpec | None:
    done = kubectl.run("apply", "--dry-run=server", "-o", "json", "-f", "-", text=text)
    if done.returncode != 0:
        return None
    found = json.loads(done.stdout)
    return PipelineJob.from_manifest({**found, "metadata": {"name": found["metadata"]["name"]}}).spec


def by_command(folder: Path, text: str) -> JobSpec | None:
    path = folder / "job.yaml"
    path.write_text(text)
    try:
        return read_job(path, warn=print).spec
    except UserError:
        return None


def by_service(client: TestClient, text: str) -> JobSpec | None:
    own = text.replace("stdlib-llama", f"job-{next(NUMBERS)}")
    answer = client.post("/v1/jobs", content=own, headers={"Content-Type": "application/yaml"})
    assert answer.status_code in (201, 400, 422), answer.text
    if answer.status_code != 201:
        return None
    found = answer.json()
    return PipelineJob.from_manifest({**found, "metadata": {"name": found["metadata"]["name"]}}).spec


@pytest.mark.parametrize("text", cases(SAME), ids=named(SAME))
def test_a_job_is_the_same_to_all(kubectl: Kubectl, client: TestClient, tmp_path: Path, text: str) -> None:
    command = by_command(tmp_path, text)
    assert command is not None
    assert by_apiserver(kubectl, text) == command
    assert by_service(client, text) == command


@pytest.mark.parametrize("text", cases(NOWHERE), ids=named(NOWHERE))
def test_a_mistake_is_one_to_all(kubectl: Kubectl, client: TestClient, tmp_path: Path, text: str) -> None:
    assert (by_apiserver(kubectl, text), by_command(tmp_path, text), by_service(client, text)) == (None, None, None)


@pytest.mark.parametrize("text", cases(ONLY_PENSTOCK), ids=named(ONLY_PENSTOCK))
def test_what_only_penstock_takes_is_refused_by_the_cluster(
    kubectl: Kubectl, client: TestClient, tmp_path: Path, text: str
) -> None:
    assert by_apiserver(kubectl, text) is None
    command = by_command(tmp_path, text)
    assert command is not None
    assert by_service(client, text) == command


@pytest.mark.parametrize("text", cases(ONLY_KUBECTL), ids=named(ONLY_KUBECTL))
def test_what_only_kubectl_takes_is_refused_elsewhere(
    kubectl: Kubectl, client: TestClient, tmp_path: Path, text: str
) -> None:
    assert by_apiserver(kubectl, text) is not None
    assert (by_command(tmp_path, text), by_service(client, text)) == (None, None)
