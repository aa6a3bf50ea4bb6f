"""What is said to helm, kubectl and Docker to have penstock on a cluster, by programs that note what they are asked."""

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


class Noted:
    """Programs whose words are kept."""

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
        """The words of every call; the last of each is what came by its standard input."""
        return [line.split("\037") for line in self._log.read_text().splitlines()]


@pytest.fixture
def noted(tmp_path: Path) -> Noted:
    return Noted(tmp_path / "programs")


def site(noted: Noted, folder: Path, lab: State | None = None) -> Site:
    return Site(
        kubeconfig=folder / "kubeconfig",
        kubectl_program=noted.program("kubectl"),
        helm_program=noted.program("helm"),
        volumes=folder,
        lab=lab,
    )


def values(words: list[str]) -> dict[str, Any]:
    """What helm was told to set."""
    told = [words[place + 1].partition("=") for place, word in enumerate(words) if word == "--set-json"]
    return {name: json.loads(value) for name, _, value in told}


def test_a_cluster_with_names_is_told_the_images_alone(noted: Noted, tmp_path: Path) -> None:
    Installation(site=site(noted, tmp_path), images=IMAGES).install({"operator.log": "text"})
    [words] = noted.commands()
    assert words[:3] == ["helm", "upgrade", "penstock"]
    assert {"--install", "--wait", "--take-ownership", "--create-namespace", "penstock-system"} <= set(words)
    assert values(words) == {
        "operator.image": "o:1",
        "service.image": "s:1",
        "trainer.image": "t:1",
        "operator.log": "text",
    }


def test_in_a_lab_the_service_is_known_by_its_address(noted: Noted, tmp_path: Path) -> None:
    rooms = {"node1": Process(pid=2**30, start_ticks=1)}
    lab = State(name="ours", slot=3, num_nodes=1, kubernetes="", rooms=rooms)
    Installation(site=site(noted, tmp_path, lab), images=IMAGES).install({})
    applied, words = noted.commands()
    [place, service] = json.loads(applied[-1])["items"]
    assert (place["kind"], place["metadata"]["name"]) == ("Namespace", "penstock-system")
    address = service["spec"]["clusterIP"]
    assert address in map(str, lab.addresses.services)
    assert values(words)["service.hosts"] == [address]
    assert values(words)["operator.env"] == [{"name": "PENSTOCK_SERVICE_URL", "value": f"http://{address}:8470"}]


def test_kind_is_given_what_docker_builds(noted: Noted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(noted.program("docker")).parent
    noted.program("kind")
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    images = own_images.given(site(noted, tmp_path), "ours")
    asked = noted.commands()
    built = [words[words.index("--target") + 1] for words in asked if words[0] == "docker"]
    loaded = [words[3] for words in asked if words[:3] == ["kind", "load", "docker-image"]]
    assert built == ["operator", "api", "trainer"]
    assert loaded == [images.operator, images.service, images.trainer]


def test_a_job_keeps_what_it_mounts_beside_its_output() -> None:
    claim = {"data/text": {"claim": "text"}}
    manifest = with_storage(example(kubernetes={"image": "i", "volumes": claim}))
    kubernetes = manifest["spec"]["kubernetes"]
    assert kubernetes["image"] == "i"
    assert kubernetes["volumes"]["data/text"] == claim["data/text"]
    assert kubernetes["volumes"]["out"]["template"]["accessModes"] == ["ReadWriteMany"]
