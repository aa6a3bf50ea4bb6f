"""The job of `docs/guides/my-model-does-not-fit.md` is refused, and planned, as the page says."""

from __future__ import annotations

import dataclasses
import re

import pytest

from penstock.core.devices import cluster_of, device_kind
from penstock.core.errors import UserError
from penstock.core.job import ParallelismSpec, PipelineJob
from penstock.core.plan import Plan
from penstock.core.remaking import Recompute
from penstock.core.serialization import yamltext
from penstock.planner.budget import Budget
from penstock.planner.decide import decide
from penstock.planner.problem import problem_from_cluster
from tests.support.repository import ROOT

GUIDE = ROOT / "docs" / "guides" / "my-model-does-not-fit.md"
QUICK = Budget(candidates=2, opened=20, neighbours=0, moves=0, starts=1)


def examples() -> list[str]:
    """The guide's manifests: the job, and a pin stage by stage."""
    return re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_pin_stage_by_stage_is_one() -> None:
    _, pin = examples()
    parallelism = ParallelismSpec.from_manifest(yamltext.load(pin)["parallelism"])
    assert isinstance(parallelism.recompute, tuple)
    assert parallelism.recompute[1] == ()


def planned(recompute: Recompute | None) -> Plan:
    """The guide's job with another pin, by a short search."""
    spec = PipelineJob.from_manifest(yamltext.load(examples()[0])).spec
    spec = dataclasses.replace(spec, parallelism=dataclasses.replace(spec.parallelism, recompute=recompute))
    return decide(problem_from_cluster(spec, cluster_of(device_kind("h100"), 1)), QUICK).plan


@pytest.mark.parametrize("pin", [Recompute.NONE, Recompute.SELECTIVE])
def test_a_job_that_exceeds_memory_gets_the_remedy_of_the_guide(pin: Recompute) -> None:
    with pytest.raises(UserError, match=r"nothing fits in 74\.5 GiB per rank") as caught:
        planned(pin)
    assert f"remedy {caught.value.remedy}\n" in GUIDE.read_text()


def test_recomputation_makes_it_fit_at_a_small_part_of_full_ones_cost() -> None:
    shares = []
    for pin in (None, Recompute.FULL):
        plan = planned(pin)
        (sentence,) = [each for each in plan.reasons if each.startswith("recomputation: ")]
        found = re.search(r"([\d.]+) % more work", sentence)
        assert found
        shares.append(float(found[1]))
    assert shares[0] < 6
    assert shares[1] > 20
