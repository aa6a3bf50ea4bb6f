"""The README's picture of a step is drawn from the job and the hardware of the guide to described hardware."""

from __future__ import annotations

import dataclasses
import os
import re

from penstock.core.cluster import ClusterSpec
from penstock.core.job import PipelineJob
from penstock.core.serialization import yamltext
from penstock.planner.decide import decide
from penstock.planner.problem import problem_from_cluster
from penstock.planner.replay import simulated
from penstock.view.gantt import gantt
from tests.support.repository import ROOT

GUIDE = ROOT / "docs" / "guides" / "described-hardware.md"
PICTURE = ROOT / "docs" / "images" / "step.svg"
RENEW = "PENSTOCK_RENEW"
TITLE = "One step of a llama with 7 billion parameters on four devices, simulated; the digits are token slices"


def picture() -> str:
    """One step of the guide's plan, without memory: its rows show time alone."""
    hardware, manifest, *_ = re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    cluster = ClusterSpec.from_manifest(yamltext.load(hardware))
    job = PipelineJob.from_manifest(yamltext.load(manifest))
    plan = decide(problem_from_cluster(job.spec, cluster)).plan
    timeline = dataclasses.replace(simulated(plan, cluster).timeline, peak_bytes=())
    return gantt([timeline], width=1000, title=TITLE) + "\n"


def test_the_picture_is_the_guide_s_plan() -> None:
    """``PENSTOCK_RENEW=1`` draws it again."""
    drawn = picture()
    if os.environ.get(RENEW):
        PICTURE.write_text(drawn)
    assert PICTURE.read_text() == drawn
