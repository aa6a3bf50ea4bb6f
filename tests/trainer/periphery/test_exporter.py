"""The metrics endpoint, scraped as Prometheus does."""

from __future__ import annotations

import dataclasses
import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.core.errors import UserError
from penstock.core.host.ports import free_port
from penstock.core.records import StepMetrics
from penstock.core.speed import Speed
from penstock.trainer.exporter import GAUGES, SPEEDS, Exporter

HOST = "127.0.0.1"


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics") as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels["job_name"] == "tiny" for sample in samples)
    return {sample.name: sample.value for sample in samples if not sample.name.endswith("_bucket")}


METRICS = StepMetrics(
    step=0,
    loss=5.5,
    step_seconds=0.25,
    tokens_per_second=512.0,
    learning_rate=1e-3,
    gradient_norm=2.0,
    peak_bytes=12345,
)


def test_every_step_shows() -> None:
    exporter, port = Exporter("tiny"), free_port()
    exporter.predict(0.2)
    exporter.serve(HOST, port)
    assert scrape(port)["penstock_steps_total"] == 0
    exporter.update(METRICS)
    exporter.update(dataclasses.replace(METRICS, step=1, loss=5.0, validation_loss=4.5, step_seconds=0.5))
    exporter.update(dataclasses.replace(METRICS, step=2, loss=4.0))
    found = scrape(port)
    assert found["penstock_loss"] == 4.0
    assert found["penstock_validation_loss"] == 4.5
    assert found["penstock_peak_bytes"] == 12345
    assert found["penstock_predicted_step_seconds"] == 0.2
    assert found["penstock_steps_total"] == 3
    assert found["penstock_step_seconds_count"] == 3
    assert found["penstock_step_seconds_sum"] == pytest.approx(1.0)


def test_the_speed_of_a_step_shows_as_far_as_it_is_known() -> None:
    exporter, port = Exporter("tiny"), free_port()
    exporter.serve(HOST, port)
    exporter.update(METRICS)
    assert not {f"penstock_{name}" for name in SPEEDS} & scrape(port).keys()
    exporter.update(METRICS, Speed(tokens_per_second_per_device=256.0))
    found = scrape(port)
    assert found["penstock_tokens_per_second_per_device"] == 256.0
    assert "penstock_model_flops_utilization" not in found
    exporter.update(METRICS, Speed(tokens_per_second_per_device=128.0, model_flops_utilization=0.25))
    found = scrape(port)
    assert found["penstock_tokens_per_second_per_device"] == 128.0
    assert found["penstock_model_flops_utilization"] == 0.25


def test_gauges_are_fields_of_the_metrics() -> None:
    assert set(GAUGES) <= {field.name for field in dataclasses.fields(StepMetrics)}
    assert set(SPEEDS) == {field.name for field in dataclasses.fields(Speed)}


def test_two_runs_in_one_process_do_not_meet() -> None:
    for _ in range(2):
        Exporter("tiny").update(METRICS)


def test_a_port_that_is_taken_is_the_user_s_to_change() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} cannot be used: Address already in use") as caught:
            Exporter("tiny").serve(HOST, port)
    assert caught.value.where == "--metrics-port"
    assert caught.value.remedy


def test_a_port_that_cannot_exist() -> None:
    with pytest.raises(UserError, match="port 70000 cannot be used"):
        Exporter("tiny").serve(HOST, 70000)
