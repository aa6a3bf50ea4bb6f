"""The policy for jobs, for operator and service alike: read from a file, and applied with the labels of a namespace."""

from __future__ import annotations

from pathlib import Path

from penstock.core import jsontext
from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.job_policy import JobPolicy, refers_to_secrets, refusals
from penstock.kube.resources import NAMESPACES
from penstock.kube.transport import Reads, unless_missing


def read_policy(path: Path) -> JobPolicy:
    """The policy in a file of JSON, which the chart writes; raises `UserError` for one that cannot be used."""
    remedy = "write JSON, as the key policy.json of the chart's ConfigMap NAME-job-policy has it"
    try:
        return JobPolicy.from_manifest(jsontext.load(path.read_text()))
    except UserError as error:
        raise UserError(what=f"{error.where}: {error.what}", where=str(path), remedy=error.remedy) from None
    except OSError as error:
        raise UserError(what=f"cannot be read: {error.strerror}", where=str(path), remedy=remedy) from None
    except ValueError as error:
        raise UserError(what=f"is not JSON: {error}", where=str(path), remedy=remedy) from None


def refusals_on(cluster: Reads, job: PipelineJob, policy: JobPolicy) -> list[UserError]:
    """Every reason why the job may not run on the cluster; its namespace is read only if its labels matter."""
    namespace, spec = job.metadata.namespace, job.spec.kubernetes
    labels = _labels(cluster, namespace) if refers_to_secrets(spec) else {}
    return refusals(spec, namespace, policy, labels)


def _labels(cluster: Reads, namespace: str) -> dict[str, str]:
    """The labels of a namespace; none if it does not exist."""
    existing = unless_missing(cluster.get, NAMESPACES, "", namespace)
    return {} if existing is None else dict(existing["metadata"].get("labels") or {})
