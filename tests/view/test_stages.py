"""The plan's picture: tiles to scale, every unit on the rail, names that say what a stage owns."""

from __future__ import annotations

import dataclasses
import itertools
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.layout import Operation, Precision, remaking
from penstock.core.model import UnitKind
from penstock.core.plan import Plan
from penstock.core.remaking import Remake
from penstock.core.schedule import ScheduleSpec
from penstock.view.stages import owned_units, recomputation_text, stage_name, stages
from tests.support.sample_run import sample_model, sample_plan

SVG = "{http://www.w3.org/2000/svg}"


def plan_of(layers: int, edges: list[int], slices: tuple[int, ...]) -> Plan:
    return Plan(
        model=sample_model(layers),
        precision=Precision.FP32,
        pp=len(edges) - 1,
        microbatch=1,
        num_microbatches=1,
        slices=slices,
        stages=tuple(itertools.pairwise(edges)),
        schedule=ScheduleSpec(generator="gpipe"),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layers = draw(st.integers(1, 40))
    num_units = 2 * layers + 2
    inner = draw(st.sets(st.integers(1, num_units - 1), max_size=12))
    slices = draw(st.lists(st.integers(1, 500), min_size=1, max_size=60))
    return plan_of(layers, [0, *sorted(inner), num_units], tuple(slices))


def tiles(picture: str) -> list[ET.Element]:
    root = ET.fromstring(picture)
    return [rect for rect in root.iter(f"{SVG}rect") if "tile" in rect.get("class", "").split()]


def rail(picture: str) -> list[str]:
    root = ET.fromstring(picture)
    units = [rect for rect in root.iter(f"{SVG}rect") if "tile" not in rect.get("class", "")]
    return [title for rect in units if (title := rect.findtext(f"{SVG}title"))]


@given(plans(), st.sampled_from([320, 1120]))
@settings(max_examples=50)
def test_tiles_are_to_scale_both_ways(plan: Plan, width: int) -> None:
    found = tiles(stages(plan, width=width))
    num_columns = len(found) // len(plan.stages)
    widths = [float(tile.get("width", "")) for tile in found[:num_columns]]
    heights = [float(tile.get("height", "")) for tile in found[::num_columns]]
    units = [stop - first for first, stop in plan.stages]
    assert all(abs(h / heights[0] - u / units[0]) < 0.02 * u / units[0] for h, u in zip(heights, units, strict=True))
    left = float(found[0].get("x", ""))
    assert abs(sum(widths) - (width - left)) < 0.02 * len(widths)
    if num_columns == len(plan.slices):
        token = (width - left) / plan.sequence_length
        assert all(abs(w - token * s) < 0.02 for w, s in zip(widths, plan.slices, strict=True))


@given(plans())
@settings(max_examples=50)
def test_every_unit_is_on_the_rail_once_in_order(plan: Plan) -> None:
    assert rail(stages(plan)) == [unit.name for unit in plan.model.units]


@given(plans())
@settings(max_examples=100)
def test_names_of_stages_cover_the_model(plan: Plan) -> None:
    words = [phrase for i in range(len(plan.stages)) for phrase in owned_units(plan, i).split(", ")]
    assert words[0] == "embedding"
    assert words[-1] == "head"
    blocks: list[int] = []
    halves: list[int] = []
    for phrase in words[1:-1]:
        if phrase.startswith("block"):
            first, _, last = phrase.split()[1].partition("–")
            blocks.extend(range(int(first), int(last or first) + 1))
        else:
            halves.append(int(phrase.split(" of ")[1]))
    assert sorted([*blocks, *halves[::2]]) == list(range(plan.model.layers))
    assert halves[::2] == halves[1::2]


@pytest.mark.parametrize(
    ("first", "stop", "words"),
    [
        (0, 18, "embedding, blocks 0–7, head"),
        (0, 1, "embedding"),
        (1, 3, "block 0"),
        (2, 4, "MLP of 0, attention of 1"),
        (2, 6, "MLP of 0, block 1, attention of 2"),
        (16, 18, "MLP of 7, head"),
        (17, 18, "head"),
    ],
)
def test_the_units_of_a_stage_in_words(first: int, stop: int, words: str) -> None:
    edges = sorted({0, first, stop, 18})
    plan = plan_of(8, edges, (64,))
    assert owned_units(plan, edges.index(first)) == words


@pytest.mark.parametrize(
    ("first", "stop", "words"),
    [
        (16, 18, "MLP of 7, part 1 of 4 of the head"),
        (18, 20, "parts 2–3 of 4 of the head"),
        (20, 21, "part 4 of 4 of the head"),
    ],
)
def test_parts_of_the_head_are_counted_from_one(first: int, stop: int, words: str) -> None:
    edges = [0, 16, 18, 20, 21]
    plan = plan_of(8, [0, 18], (64,))
    divided = dataclasses.replace(plan, head_parts=4, pp=4, stages=tuple(itertools.pairwise(edges)))
    assert owned_units(divided, edges.index(first)) == words
    picture = stages(divided)
    assert "embedding, head in 4 parts" in picture
    assert f"head, part {stop - 17} of 4" in picture


def test_ranks_are_named_only_where_the_plan_knows_them() -> None:
    plan = sample_plan()
    assert stage_name(plan, 1) == "stage 1, rank 1"
    virtual = dataclasses.replace(plan, stages=((0, 4), (4, 9), (9, 13), (13, 18)))
    assert stage_name(virtual, 3) == "stage 3"
    sharded = dataclasses.replace(plan, tp=4, placement=())
    assert stage_name(sharded, 1) == "stage 1, ranks 4–7"


def test_stages_name_what_they_recompute() -> None:
    full = Remake(unit=UnitKind.ATTENTION, count=2, operations=tuple(remaking(sample_model(4), UnitKind.ATTENTION)))
    norms = Remake(unit=UnitKind.ATTENTION, count=1, operations=(Operation.NORM,))
    cheap = Remake(unit=UnitKind.MLP, count=2, operations=(Operation.NORM, Operation.ACTIVATE))
    plan = dataclasses.replace(plan_of(4, [0, 7, 10], (4,)), recompute=((full, norms, cheap), ()))
    words = "everything of 2 of 3 and norms of 1 of 3 attention units, norms and activation functions of 2 of 3 MLPs"
    assert [recomputation_text(plan, stage) for stage in range(2)] == [words, ""]
    texts = [tile.findtext(f"{SVG}title") or "" for tile in tiles(stages(plan))]
    assert [text.endswith(f"; recomputed: {words}") for text in texts] == [True, False]
    assert recomputation_text(dataclasses.replace(plan, recompute=()), 0) == ""


def test_slices_are_named_with_their_lengths() -> None:
    shown = [node.text for node in ET.fromstring(stages(sample_plan())).iter(f"{SVG}text")]
    assert {"slice 0", "320 tokens", "slice 3", "208 tokens", "stage 0, rank 0"} <= set(shown)
    tooltip = tiles(stages(sample_plan()))[1].findtext(f"{SVG}title")
    assert tooltip == "stage 0, slice 1: tokens 320 to 583, attending to 320 before them"


def test_later_slices_are_stronger() -> None:
    strengths = [float(tile.get("fill-opacity", "")) for tile in tiles(stages(sample_plan()))[:4]]
    assert strengths == sorted(set(strengths))


def test_many_stages_and_slices_stay_small() -> None:
    plan = plan_of(96, [0, *range(3, 193, 2), 194], (8,) * 256)
    picture = stages(plan)
    assert len(picture) < 1_500_000
    assert len(tiles(picture)) <= 6_000
    assert "slices 0 to " in picture


def test_a_narrow_picture_puts_names_above_the_tiles() -> None:
    root = ET.fromstring(stages(sample_plan(), width=320))
    names = [node for node in root.iter(f"{SVG}text") if (node.text or "").startswith("stage")]
    assert [node.text for node in names] == [
        "stage 0, rank 0: embedding, blocks 0–3,",
        "stage 1, rank 1: MLP of 4, blocks 5–7, head",
    ]
    assert [node.get("x") for node in names] == ["0", "0"]
    (rest,) = [node for node in root.iter(f"{SVG}text") if node.text == "attention of 4"]
    assert float(rest.get("y") or 0) > float(names[0].get("y") or 0), "on a separate line"
