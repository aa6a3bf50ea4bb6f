"""Installation of penstock on a cluster: arguments and input of helm, kubectl and Docker, recorded by scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy import own_images
from deploy.demonstration import with_storage
from deploy.installation import Installation
from deploy.own_images import Images
from deploy.site import Site
from tests.support.manifests import example
from tools.lab.processes import Process
from tools.lab.state import State

IMAGES = Images(operator="o:1", service="s:1", trainer="t:1")


class Recorder:
    """Creates programs that record their arguments and input."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._log = folder, folder / "log"
        folder.mkdir()

    def program(self, name: str) -> str:
        path = self._folder / name
        path.write_text(
            f'#!/bin/sh\nprintf "%s\\037" {name} "$@" >> {self._log}\ncat >> {self._log}\necho >> {self._log}\n'
        )
        path.chmod(0o755)
        return str(path)

    def commands(self) -> list[list[str]]:
        """Return the words of every call; the last word is its standard input."""
        return [line.split("\037") for line in self._log.read_text().splitlines()]


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "programs")


def site(recorder: Recorder, folder: Path, lab: State | None = None) -> Site:
    return Site(
        kubeconfig=folder / "kubeconfig",
        kubectl_program=recorder.program("kubectl"),
        helm_program=recorder.program("helm"),
        volumes=folder,
        lab=lab,
    )


def values(words: list[str]) -> dict[str, Any]:
    """Return the chart values in the arguments of helm."""
    settings = [words[index + 1].partition("=") for index, word in enumerate(words) if word == "--set-json"]
    return {name: json.loads(value) for name, _, value in settings}


def test_outside_of_a_lab_the_chart_gets_only_the_images(recorder: Recorder, tmp_path: Path) -> None:
    Installation(site=site(recorder, tmp_path), images=IMAGES).install({"operator.log": "text"})
    [words] = recorder.commands()
    assert words[:3] == ["helm", "upgrade", "penstock"]
    assert {"--install", "--wait", "--take-ownership", "--create-namespace", "penstock-system"} <= set(words)
    assert values(words) == {
        "operator.image": "o:1",
        "service.image": "s:1",
        "trainer.image": "t:1",
        "operator.log": "text",
    }


def test_in_a_lab_the_service_has_a_fixed_address(recorder: Recorder, tmp_path: Path) -> None:
    machines = {"node1": Process(pid=2**30, start_ticks=1)}
    lab = State(name="ours", slot=3, num_nodes=1, kubernetes="", machines=machines)
    Installation(site=site(recorder, tmp_path, lab), images=IMAGES).install({})
    apply, words = recorder.commands()
    [namespace, service] = json.loads(apply[-1])["items"]
    assert (namespace["kind"], namespace["metadata"]["name"]) == ("Namespace", "penstock-system")
    address = service["spec"]["clusterIP"]
    assert address in map(str, lab.addresses.services)
    assert values(words)["service.hosts"] == [address]
    assert values(words)["operator.env"] == [{"name": "PENSTOCK_SERVICE_URL", "value": f"http://{address}:8470"}]


def test_images_of_docker_are_loaded_into_kind(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(recorder.program("docker")).parent
    recorder.program("kind")
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    images = own_images.given(site(recorder, tmp_path), "ours")
    commands = recorder.commands()
    built = [words[words.index("--target") + 1] for words in commands if words[0] == "docker"]
    loaded = [words[3] for words in commands if words[:3] == ["kind", "load", "docker-image"]]
    assert built == ["operator", "api", "trainer"]
    assert loaded == [images.operator, images.service, images.trainer]


def test_a_job_keeps_its_volumes_next_to_its_output() -> None:
    claim = {"data/text": {"claim": "text"}}
    manifest = with_storage(example(kubernetes={"image": "i", "volumes": claim}))
    kubernetes = manifest["spec"]["kubernetes"]
    assert kubernetes["image"] == "i"
    assert kubernetes["volumes"]["data/text"] == claim["data/text"]
    assert kubernetes["volumes"]["out"]["template"]["accessModes"] == ["ReadWriteMany"]
