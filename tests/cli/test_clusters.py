"""`penstock cluster` and `plan --costs`: descriptions that are written, shown and planned with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.cli.manifests import read_cluster
from penstock.core.cluster import SoftwareSpec
from penstock.core.devices import cluster_of, device_kind, device_kinds
from penstock.core.serialization import yamltext
from penstock.planner.work import PASSES_WITH_WORK
from tests.support.manifests import example

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("device", device_kinds())
def test_what_is_written_reads_as_the_kind(device: str, capsys: Captured) -> None:
    assert main(["cluster", "init", "c.yaml", "--device", device, "--nodes", "3"]) == 0
    assert read_cluster(Path("c.yaml")) == cluster_of(device_kind(device), 3)
    assert "penstock plan JOB --cluster c.yaml" in capsys.readouterr().err
    text = Path("c.yaml").read_text()
    assert all(source.source in text and source.date in text for source in device_kind(device).sources)


def test_every_default_of_the_software_is_shown() -> None:
    assert main(["cluster", "init"]) == 0
    text = Path("cluster.yaml").read_text()
    shown = text[text.index("# software:") :].replace("\n# ", "\n").removeprefix("# ")
    written = yamltext.load(shown)["software"]
    assert SoftwareSpec.from_manifest(written) == SoftwareSpec()
    assert len(written) == len(SoftwareSpec.__slots__)


def test_a_description_is_not_replaced_without_force(capsys: Captured) -> None:
    Path("c.yaml").write_text("mine")
    assert main(["cluster", "init", "c.yaml"]) == 2
    assert "--force" in capsys.readouterr().err
    assert Path("c.yaml").read_text() == "mine"
    assert main(["cluster", "init", "c.yaml", "--name", "big", "--force"]) == 0
    assert read_cluster(Path("c.yaml")).name == "big"


def test_an_unknown_device_is_refused_with_the_nearest(capsys: Captured) -> None:
    assert main(["cluster", "init", "--device", "a100"]) == 2
    assert "choose a100-40 or a100-80" in capsys.readouterr().err


def test_the_kinds_are_listed(capsys: Captured) -> None:
    assert main(["cluster", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {device} " in shown for device in device_kinds())
    assert main(["cluster", "list", "--output", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["h100"]["device"]["peakFlops"] == 989e12


def costs(path: Path, per_token: float) -> str:
    lines = ["unit,pass,tokens,pairs,seconds"]
    for unit, kind in PASSES_WITH_WORK:
        lines += [f"{unit},{kind},{n},{pairs},{per_token * n}" for n in (64, 256) for pairs in (n * n // 2, n * n)]
    path.write_text("\n".join(lines))
    return str(path)


def test_a_table_of_costs_is_planned_with(tmp_path: Path, capsys: Captured) -> None:
    Path("job.yaml").write_text(yamltext.dump(example(parallelism={"pp": 2, "slices": 1, "schedule": "gpipe"})))
    assert main(["cluster", "init", "c.yaml", "--device", "a100-80"]) == 0
    steps = []
    for name, per_token in (("fast", 1e-6), ("slow", 1e-4)):
        arguments = [
            "plan",
            "job.yaml",
            "--cluster",
            "c.yaml",
            "--costs",
            costs(tmp_path / name, per_token),
            "-o",
            "json",
        ]
        assert main(arguments) == 0
        steps.append(json.loads(capsys.readouterr().out)["prediction"]["stepSeconds"])
    assert steps[1] > 50 * steps[0]


def test_a_table_needs_a_cluster(tmp_path: Path, capsys: Captured) -> None:
    Path("job.yaml").write_text(yamltext.dump(example()))
    assert main(["plan", "job.yaml", "--costs", costs(tmp_path / "t.csv", 1e-6)]) == 2
    assert "--costs needs --cluster" in capsys.readouterr().err


def test_a_mistake_in_a_table_is_said_with_its_line(capsys: Captured) -> None:
    Path("job.yaml").write_text(yamltext.dump(example()))
    Path("t.csv").write_text("unit,pass,tokens,pairs,seconds\nmlp,F,1,1,fast\n")
    assert main(["cluster", "init", "c.yaml"]) == 0
    assert main(["plan", "job.yaml", "--cluster", "c.yaml", "--costs", "t.csv"]) == 2
    assert "t.csv, line 2, seconds" in capsys.readouterr().err


def test_ranks_stay_unused_and_tensor_parallelism_spans_nodes_where_that_is_asked_for(capsys: Captured) -> None:
    assert main(["cluster", "init", "c.yaml", "--device", "a100-80", "--nodes", "2"]) == 0

    def plan(**changes: object) -> Any:
        Path("job.yaml").write_text(yamltext.dump(example(**changes)))
        assert main(["plan", "job.yaml", "--cluster", "c.yaml", "-o", "json"]) == 0
        return json.loads(capsys.readouterr().out)

    cuda = {"device": "cuda", "ranks": 15, "minRanks": 8, "memoryPerRank": "70Gi"}
    heads = {"family": "llama", "layers": 2, "hidden": 2048, "heads": 16, "kvHeads": 4}
    fewer = plan(resources=cuda, model=heads, training__globalBatch=8)
    assert 8 <= fewer["dp"] * fewer["tp"] * fewer["pp"] < 15  # no division of 15 suits 8 sequences
    assert any("stay unused: no plan that was found uses all of them" in reason for reason in fewer["reasons"])
    wide = plan(resources={**cuda, "ranks": 16}, model=heads, parallelism={"tp": 16})
    assert wide["tp"] == 16
