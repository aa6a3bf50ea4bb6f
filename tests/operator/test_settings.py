"""What an operator is told by its environment, and what it refuses to be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.errors import UserError
from penstock.core.job_policy import JobPolicy
from penstock.operator.settings import Settings, settings_from


def test_nothing() -> None:
    assert settings_from({}) == Settings()


def test_all_of_it(tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.crt"
    ca_file.write_text("-----BEGIN")
    told = settings_from(
        {
            "PENSTOCK_OWN_NAMESPACE": "own",
            "PENSTOCK_NAMESPACE": "team",
            "PENSTOCK_TRAINER_IMAGE": "trainer:1",
            "PENSTOCK_SERVICE_URL": "https://service",
            "PENSTOCK_SERVICE_CA_FILE": str(ca_file),
            "PENSTOCK_PLANNERS": "2",
            "PENSTOCK_METRICS_PORT": "0",
        }
    )
    assert told == Settings(
        own_namespace="own",
        policy=JobPolicy(own_namespace="own"),
        namespace="team",
        image="trainer:1",
        service="https://service",
        service_ca="-----BEGIN",
        num_planners=2,
        metrics_port=0,
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PENSTOCK_PLANNERS", "many"),
        ("PENSTOCK_PLANNERS", "0"),
        ("PENSTOCK_PLANNERS", "-1"),
        ("PENSTOCK_PLANNERS", "65"),
        ("PENSTOCK_METRICS_PORT", "70000"),
        ("PENSTOCK_METRICS_PORT", "http"),
        ("PENSTOCK_SERVICE_CA_FILE", "/nowhere/ca.crt"),
        ("PENSTOCK_SERVICE_CA_FILE", "/"),
    ],
)
def test_what_cannot_be_used_is_named(variable: str, value: str) -> None:
    with pytest.raises(UserError) as raised:
        settings_from({variable: value})
    assert raised.value.where == variable
    assert raised.value.remedy
