"""Tokens per second per device and model FLOP utilization, by their formulas and in words."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.core.devices import device_kind, device_kinds, reported_peak_flops
from penstock.core.errors import UserError
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.speed import Speed, format_rate, speed_columns, speed_of
from tests.support.sample_run import sample_plan

LLAMA_7B = ModelSpec(family=Family.LLAMA, layers=32, hidden=4096, heads=32, vocab=32000, ffn_hidden=11008)


def of(step_seconds: float = 0.5, *, sequences: int = 1, devices: int = 1, peak: float | None = 312e12) -> Speed | None:
    return speed_of(
        LLAMA_7B,
        num_sequences=sequences,
        sequence_length=2048,
        num_devices=devices,
        step_seconds=step_seconds,
        peak_flops=peak,
    )


def test_the_example_of_the_convention() -> None:
    """6 FLOPs per weight of a matrix and token; 12 h per causal pair and layer."""
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    pairs = 2048 * 2049 // 2
    flops = 6 * matrices * 2048 + 32 * 12 * 4096 * pairs
    found = of()
    assert found is not None
    assert found.tokens_per_second_per_device == 4096
    assert found.model_flops_utilization == pytest.approx(flops / (0.5 * 312e12))
    assert found.text == "4,096 tokens/s per device, MFU 54.2 %"


def test_more_devices_for_as_many_more_sequences_are_as_fast() -> None:
    assert of(sequences=8, devices=8) == of()
    assert of(devices=2) == of(1.0)


def test_without_a_peak_there_is_no_utilization_and_without_a_time_nothing() -> None:
    found = of(peak=None)
    assert found is not None
    assert found.model_flops_utilization is None
    assert found.text == "4,096 tokens/s per device"
    assert of(0.0) is None


def test_a_slower_step_is_that_much_slower() -> None:
    found = of()
    assert found is not None
    assert found.slowed(2.0) == of(1.0)
    assert found.slowed(1.0) == found


def test_a_table_has_columns_for_the_known_values_of_its_rows() -> None:
    cpu, gpu = of(peak=None), of()
    both = speed_columns([gpu, None, cpu], missing="–")
    assert both.headers == ("tokens/s per device", "MFU")
    assert both.rows == (("4,096", "54.2 %"), ("–", "–"), ("4,096", "–"))
    assert speed_columns([cpu, None]).headers == ("tokens/s per device",)
    assert speed_columns([cpu, None]).rows == (("4,096",), ("",))
    assert speed_columns([None, None]).headers == ()
    assert speed_columns([None, None]).rows == ((), ())
    assert speed_columns([]).rows == ()


@pytest.mark.parametrize(("rate", "text"), [(0.01234, "0.0123"), (87.3, "87.3"), (999.7, "1,000"), (12345.6, "12,346")])
def test_rates_are_shown_for_people(rate: float, text: str) -> None:
    assert format_rate(rate) == text


def test_a_plan_has_the_speed_of_its_prediction_and_of_what_was_measured() -> None:
    plan = sample_plan()
    assert plan.prediction is not None
    fast = dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, peak_flops=1e12))
    predicted, measured = fast.speed(), fast.speed(2 * plan.prediction.step_seconds)
    assert predicted is not None
    assert measured is not None
    assert predicted.tokens_per_second_per_device == pytest.approx(2 * measured.tokens_per_second_per_device)
    assert predicted.model_flops_utilization is not None
    assert Plan.from_manifest(fast.to_manifest()) == fast
    assert fast.for_ranks == plan.for_ranks
    assert Plan.with_confidence(fast.for_ranks.to_manifest(), fast.confidence) == fast
    assert dataclasses.replace(plan, prediction=None).speed() is None


def test_ranks_are_not_given_the_speeds_of_alternatives() -> None:
    """Ranks of version 0.1.0 refuse a field that they do not know."""
    plan, speed = sample_plan(), of()
    assert len(plan.alternatives) > 1
    first, *others = plan.alternatives
    fast = dataclasses.replace(plan, alternatives=(first, *(dataclasses.replace(each, speed=speed) for each in others)))
    given = fast.for_ranks.to_manifest()
    assert not any("speed" in each for each in given["alternatives"])
    assert Plan.with_confidence(given, fast.confidence) == fast
    unpredicted = dataclasses.replace(fast, prediction=None)
    given = unpredicted.for_ranks.to_manifest()
    assert not any("speed" in each for each in given["alternatives"])
    assert Plan.with_confidence(given, unpredicted.confidence) == unpredicted


@pytest.mark.parametrize("speeds", [[{"tokensPerSecondPerDevice": "fast"}], [None] * 40 + [{}]])
def test_speeds_of_no_alternatives_are_refused(speeds: list[object]) -> None:
    with pytest.raises(UserError):
        Plan.with_confidence(sample_plan().for_ranks.to_manifest(), {"alternativeSpeeds": speeds})


def test_devices_are_known_by_the_name_that_their_driver_reports() -> None:
    assert reported_peak_flops("NVIDIA H100 80GB HBM3", Precision.BF16) == 989e12
    assert reported_peak_flops("NVIDIA H100 80GB HBM3", Precision.FP32) is None
    assert reported_peak_flops("", Precision.BF16) is None
    names = [device_kind(kind).reported_name for kind in device_kinds() if device_kind(kind).reported_name]
    assert len(set(names)) == len(names)
