"""Settings of the operator, from its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.job_policy import Allowance, JobPolicy
from penstock.core.pod import MEASURES_LABEL
from penstock.kube.allowing import read_policy

METRICS_VARIABLE = "PENSTOCK_METRICS_PORT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one operator. ``namespace`` is the only one whose jobs it handles; all if empty.

    ``image`` is the default image of ranks. ``service`` is the URL by which pods reach the service, and ``service_ca``
    the PEM certificates that they trust it by. Without a URL no steps are reported. ``own_namespace`` is the namespace
    of the operator and the service. ``metrics_port`` serves Prometheus; 0 disables it. ``policy`` limits jobs;
    ``image`` is always allowed.
    """

    own_namespace: str = "penstock-system"
    namespace: str = ""
    image: str = ""
    service: str = ""
    service_ca: str = ""
    num_planners: int = 1
    resync_seconds: float = 60.0
    metrics_port: int = 8080
    policy: JobPolicy = field(default_factory=JobPolicy)

    @property
    def measuring_namespace(self) -> str:
        """Namespace in which ClusterProfiles are measured: the only one that the operator handles, or its own."""
        return self.namespace or self.own_namespace

    def policy_for(self, job: PipelineJob) -> JobPolicy:
        """Return the policy for this job, with the resources and volumes that the operator's own pods need."""
        everywhere = self.policy.everywhere + Allowance(images=(self.image,) if self.image else ())
        own = [self.measuring_namespace] if MEASURES_LABEL in job.metadata.labels else []
        return replace(self.policy, namespaces=(*self.policy.namespaces, *own), everywhere=everywhere)


def settings_from(environment: Mapping[str, str]) -> Settings:
    """Return the settings by the variables PENSTOCK_...; raises `UserError` for invalid values."""
    own, policy = environment.get("PENSTOCK_OWN_NAMESPACE", "penstock-system"), environment.get("PENSTOCK_POLICY_FILE")
    return Settings(
        own_namespace=own,
        namespace=environment.get("PENSTOCK_NAMESPACE", ""),
        image=environment.get("PENSTOCK_TRAINER_IMAGE", ""),
        policy=read_policy(Path(policy)) if policy else JobPolicy(own_namespace=own),
        service=environment.get("PENSTOCK_SERVICE_URL", ""),
        service_ca=_text(environment, "PENSTOCK_SERVICE_CA_FILE"),
        num_planners=_number(environment, "PENSTOCK_PLANNERS", 1, range(1, 65)),
        metrics_port=port_of(environment, METRICS_VARIABLE, 8080),
    )


def port_of(environment: Mapping[str, str], variable: str, default: int) -> int:
    """Return the port in the variable; raises `UserError` for anything else."""
    return _number(environment, variable, default, range(65_536))


def _text(environment: Mapping[str, str], variable: str) -> str:
    """Return the content of the file that the variable names."""
    path = environment.get(variable, "")
    try:
        return Path(path).read_text() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        what, remedy = f"{path} cannot be read: {reason}", "mount the file there, or unset the variable"
        raise UserError(what=what, where=variable, remedy=remedy) from None


def _number(environment: Mapping[str, str], variable: str, default: int, allowed: range) -> int:
    text = environment.get(variable) or str(default)
    if not text.isdecimal() or int(text) not in allowed:
        remedy = f"write a number from {allowed.start} to {allowed.stop - 1}, or unset the variable for {default}"
        raise UserError(what=f"{text[:60]!r} is not a number in the allowed range", where=variable, remedy=remedy)
    return int(text)
