"""The Dockerfile: its inputs exist and are pinned, its images have only their members and run as a plain user."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

import pytest

from tests.support.members import IMAGES, brought_by
from tests.support.repository import ROOT, components, members

TEXT = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
MEMBERS = {
    "operator": {"core", "planner", "kube", "operator"},
    "api": {"core", "planner", "view", "kube", "client", "api", "cli"},
    "trainer": {"core", "planner", "client", "agent", "trainer"},
}
TARGETS = tuple(MEMBERS)


def stages() -> dict[str, list[str]]:
    """Instructions by the name of their stage."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in (line for line in TEXT.splitlines() if line.strip() and not line.startswith("#")):
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            name = match[2]
            found[name] = [line]
        elif name:
            found[name].append(line)
    return found


def lineage(name: str) -> list[str]:
    """The instructions of a stage, after those of the stages that it begins from."""
    first, *rest = stages()[name]
    base = first.split()[1]
    return [*(lineage(base) if base in stages() else []), *rest]


@pytest.mark.parametrize("target", TARGETS)
def test_it_runs_as_nobody_and_writes_nothing_of_its_own(target: str) -> None:
    instructions = lineage(target)
    assert [line for line in instructions if line.startswith("USER ")] == ["USER 65532:65532"]
    (variables,) = (line for line in instructions if line.startswith("ENV "))
    assert "PYTHONDONTWRITEBYTECODE=1" in variables
    assert "HOME=/tmp" in variables
    assert " USER=" in variables  # kopf and torch ask for a name, which this user has nowhere


@pytest.mark.parametrize("target", TARGETS)
def test_it_starts_a_command_of_its_members(target: str) -> None:
    (entry,) = (line for line in lineage(target) if line.startswith("ENTRYPOINT "))
    (command,) = re.findall(r'"([^"]+)"', entry)
    assert command in {name for member in MEMBERS[target] for name in members()[member].get("scripts", {})}


def installed(target: str) -> list[str]:
    """The members that it asks pip for."""
    install = next(line for line in stages()[f"build-{target}"] if "--constraint /wheels/penstock.txt" in line)
    return re.findall(r" (penstock-[\w-]+)", install.partition("--constraint /wheels/penstock.txt")[2])


@pytest.mark.parametrize("target", TARGETS)
def test_it_holds_its_members_and_no_others(target: str) -> None:
    brought = brought_by(*installed(target))
    assert brought & {project["name"] for project in members().values()} == {
        f"penstock-{each}" for each in MEMBERS[target]
    }


def test_ranks_are_not_given_what_draws_and_prints() -> None:
    assert brought_by(*installed("trainer")) & {"rich", "plotly", "typer", "kubernetes", "fastapi"} == set()


@pytest.mark.parametrize("target", TARGETS)
def test_it_holds_what_tests_run_with(target: str) -> None:
    """In `tests/integration/test_members_of_images.py` and `test_service_without_torch.py`."""
    assert brought_by(*installed(target)) == brought_by(*IMAGES[target])


def test_pods_find_the_program_that_images_of_0_1_0_have() -> None:
    """The operator starts `penstock pod`, for whichever image a job pins; both programs take the same arguments."""
    assert "RUN ln -s penstock-agent /opt/penstock/bin/penstock" in stages()["build-trainer"]
    assert "penstock" not in {name for member in MEMBERS["trainer"] for name in members()[member].get("scripts", {})}


@pytest.mark.parametrize("target", TARGETS)
def test_what_builds_it_stays_behind(target: str) -> None:
    assert not [line for line in lineage(target) if line.startswith("RUN ")]
    copied = [line for line in lineage(target) if line.startswith("COPY ")]
    assert copied == [f"COPY --from=build-{target} /opt/penstock /opt/penstock"]


@pytest.mark.parametrize("target", TARGETS)
def test_what_it_holds_is_compiled_the_same_in_every_build(target: str) -> None:
    (variables,) = (line for line in lineage(f"build-{target}") if line.startswith("ENV "))
    assert "PIP_NO_COMPILE" not in variables
    assert "SOURCE_DATE_EPOCH=" in variables


def test_whatever_is_installed_is_pinned() -> None:
    installs = re.findall(r"pip install ([^&\n]*)", TEXT)
    assert len(installs) >= 4
    for install in installs:
        assert "--constraint /src/constraints.txt" in install or "--no-deps" in install, install


def test_what_is_copied_is_there_and_not_ignored() -> None:
    sources = {
        word
        for line in TEXT.splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == kept
    assert all((ROOT / source).exists() for source in sources)
    assert {PurePosixPath(component).name for component in components()} <= sources
