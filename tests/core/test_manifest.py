"""Manifests read strictly, write losslessly, and say where a mistake is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import MOST_MISTAKES, MistakesError, UserError
from penstock.core.job import OptimizerSpec, PipelineJob, TrainingSpec
from penstock.core.model import Family, ModelSpec
from penstock.core.records import StepMetrics
from penstock.core.serialization import yamltext
from penstock.core.units import parse_bytes, quantity
from tests.support.manifests import example


def test_the_example_of_the_design_is_read() -> None:
    job = PipelineJob.from_manifest(example())
    assert job.spec.model == ModelSpec(family=Family.LLAMA, layers=8, hidden=256, heads=8, kv_heads=4, vocab=4096)
    assert job.spec.training.optimizer.learning_rate == 1e-3
    assert job.spec.resources.memory_per_rank == 4 * 2**30


@pytest.mark.parametrize("text", [lambda m: json.dumps(m), yamltext.dump], ids=["json", "yaml"])
def test_a_job_round_trips(text: Any) -> None:
    changes = {"parallelism": {"slices": [512, 256, 256], "stages": [4.5, 3.5]}, "model__vocab": 1000}
    job = PipelineJob.from_manifest(example(**changes))
    assert PipelineJob.from_manifest(yamltext.load(text(job.to_manifest()))) == job


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"model__hiden": 3}, "spec.model.hiden", "did you mean hidden?"),
    ({"model__heads": 7}, "spec.model.heads", "divisors of 256"),
    ({"model__kvHeads": 3}, "spec.model.kvHeads", "divisors of 8"),
    ({"training__schedule": "cosin"}, "spec.training.schedule", "did you mean cosine?"),
    ({"training__steps": 0}, "spec.training.steps", "at least 1"),
    ({"training__steps": "many"}, "spec.training.steps", "a whole number"),
    ({"training__steps": True}, "spec.training.steps", "a whole number"),
    ({"training__optimizer": {"learningRate": -1.0}}, "spec.training.optimizer.learningRate", "such as 0.001"),
    ({"training__optimizer": {"learningRate": math.nan}}, "spec.training.optimizer.learningRate", "a finite number"),
    (
        {"training__optimizer": {"learningRate": 10**400}},
        "spec.training.optimizer.learningRate",
        "write at most 1000000000000000000",
    ),
    ({"training__optimizer": {"betas": [0.9, 1]}}, "spec.training.optimizer.betas[1]", "[0.9, 0.95]"),
    ({"training__optimizer": {"betas": [-0.1, 0.9]}}, "spec.training.optimizer.betas[0]", "[0.9, 0.95]"),
    ({"training__optimizer": {"epsilon": 0}}, "spec.training.optimizer.epsilon", "such as 1e-08"),
    ({"training__optimizer": {"weightDecay": -0.1}}, "spec.training.optimizer.weightDecay", "0 or more"),
    ({"training__clip": math.nan}, "spec.training.clip", "a finite number"),
    ({"training__clip": math.inf}, "spec.training.clip", "a finite number"),
    ({"training__clip": 0}, "spec.training.clip", "such as 1.0"),
    ({"training__warmupSteps": -1}, "spec.training.warmupSteps", "0 or more"),
    ({"training__validateEvery": -1}, "spec.training.validateEvery", "0 or more"),
    ({"training__decayShare": 1.5}, "spec.training.decayShare", "from 0 to 1"),
    ({"training__minLearningRate": -0.1}, "spec.training.minLearningRate", "from 0 to 1"),
    ({"model__normEpsilon": 0}, "spec.model.normEpsilon", "such as 1e-05"),
    ({"model__normEpsilon": math.inf}, "spec.model.normEpsilon", "a finite number"),
    ({"model__ropeTheta": -1}, "spec.model.ropeTheta", "such as 10000.0"),
    ({"pricePerDeviceHour": -1}, "spec.pricePerDeviceHour", "0 or more"),
    ({"parallelism__stages": [math.nan, 8]}, "spec.parallelism.stages[0]", "a finite number"),
    ({"resources__memoryPerRank": "4 gigs"}, "spec.resources.memoryPerRank", "4Gi"),
    ({"resources__minRanks": 3}, "spec.resources.minRanks", "lower it"),
    ({"parallelism__slices": [512, 256]}, "spec.parallelism.slices", "sum agrees"),
    ({"parallelism__stages": [4, 5]}, "spec.parallelism.stages", "sum agrees"),
    ({"parallelism__stages": [4.2, 3.8]}, "spec.parallelism.stages[0]", "4 or 4.5"),
    ({"parallelism__pp": 3}, "spec.parallelism", "factors of resources.ranks"),
    ({"parallelism__pp": 4, "resources__ranks": 7, "resources__minRanks": 5}, "spec.parallelism", "factors of"),
    ({"parallelism__dp": 2, "training__globalBatch": 3}, "spec.parallelism", "divisor of training.globalBatch"),
    ({"parallelism__microBatch": 5}, "spec.parallelism", "pin at most"),
    ({"data__tokenizer": {"train": "bpe", "vocab": 3}}, "spec.data.tokenizer.vocab", "vocab: 4096"),
    ({"data__tokenizer": {"file": "tokenizer.json"}}, "spec.model.vocab", "number of tokens"),
    ({"objective": "cost"}, "spec.pricePerDeviceHour", "above 0"),
    ({"budget": 100}, "spec.pricePerDeviceHour", "or leave out budget"),
    ({"budget": 0, "pricePerDeviceHour": 1}, "spec.budget", "a positive number"),
    ({"deadlineSeconds": 0}, "spec.deadlineSeconds", "at least 1"),
    ({"resources__spot": "yes"}, "spec.resources.spot", "true or false"),
    ({"runPolicy__backoffLimit": -1}, "spec.runPolicy.backoffLimit", "0 or more"),
]


@pytest.mark.parametrize(("changes", "where", "remedy"), MISTAKES, ids=[where for _, where, _ in MISTAKES])
def test_a_mistake_names_its_place_and_a_remedy(changes: dict[str, Any], where: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        PipelineJob.from_manifest(example(**changes))
    assert caught.value.where == where
    assert remedy in caught.value.remedy


BUILT_WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: OptimizerSpec(learning_rate=math.nan), "learningRate"),
    (lambda: OptimizerSpec(weight_decay=math.inf), "weightDecay"),
    (lambda: TrainingSpec(global_batch=1, steps=1, clip=math.nan), "clip"),
    (lambda: TrainingSpec(global_batch=1, steps=1, decay_share=math.nan), "decayShare"),
]


@pytest.mark.parametrize(("build", "where"), BUILT_WRONG, ids=[where for _, where in BUILT_WRONG])
def test_not_a_number_is_refused_in_every_field(build: Callable[[], object], where: str) -> None:
    with pytest.raises(UserError) as caught:
        build()
    assert caught.value.where == where


def test_pins_divide_a_number_of_ranks_that_the_job_may_have() -> None:
    changes = {"parallelism__pp": 4, "resources__ranks": 7, "resources__minRanks": 4}
    assert PipelineJob.from_manifest(example(**changes)).spec.parallelism.pp == 4


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_round_trips(loss: float) -> None:
    metrics = StepMetrics(
        step=1,
        loss=loss,
        step_seconds=1.0,
        tokens_per_second=1.0,
        learning_rate=1.0,
        gradient_norm=loss,
        peak_bytes=1,
        validation_loss=loss,
    )
    assert str(StepMetrics.from_manifest(metrics.to_manifest())) == str(metrics)


def test_a_missing_section_is_named() -> None:
    manifest = example()
    del manifest["spec"]["training"]
    with pytest.raises(UserError) as caught:
        PipelineJob.from_manifest(manifest)
    assert caught.value.where == "spec.training"


def test_another_kind_is_refused() -> None:
    with pytest.raises(UserError, match="kind: 'Job' is not PipelineJob"):
        PipelineJob.from_manifest({**example(), "kind": "Job"})


def test_numbers_follow_yaml_1_2() -> None:
    assert yamltext.load("a: 1e-3\nb: no\nc: 0o17") == {"a": 1e-3, "b": "no", "c": 15}


def test_broken_yaml_names_its_line() -> None:
    with pytest.raises(UserError, match=r"job\.yaml, line 2"):
        yamltext.load("a: 1\nb: [1, 2", "job.yaml")


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
def test_yaml_text_round_trips(data: Any) -> None:
    assert yamltext.load(yamltext.dump(data)) == data


@given(st.integers(min_value=0, max_value=2**60))
def test_quantities_round_trip(count: int) -> None:
    assert parse_bytes(quantity(count)) == count


@pytest.mark.parametrize(("text", "count"), [("4Gi", 2**32), ("500M", 500_000_000), ("1.5Ki", 1536), ("7", 7)])
def test_quantities_follow_kubernetes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_of_many_mistakes_the_first_are_reported() -> None:
    """The work and the answer must not grow with what anybody sends."""
    with pytest.raises(MistakesError) as caught:
        ModelSpec.from_manifest({f"unknown{number}": 1 for number in range(10_000)})
    assert len(caught.value.errors) == MOST_MISTAKES
