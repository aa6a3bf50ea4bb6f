"""The job that measures for a ClusterProfile, and the summary for its status. Nothing is read or sent."""

from __future__ import annotations

from statistics import median

from penstock.core.cluster_profile import ClusterProfile, LinksStatus, LinkStatus
from penstock.core.job import (
    DataSpec,
    JobSpec,
    Metadata,
    PipelineJob,
    ResourcesSpec,
    RunPolicySpec,
    TokenizerSpec,
    TrainingSpec,
)
from penstock.core.kubernetes_spec import KubernetesSpec
from penstock.core.pod import MEASURES_LABEL
from penstock.core.profile import LinkRecord
from penstock.core.profile_matching import ANY_GLOBAL_BATCH

RETRY_SECONDS = 3_600
"""Seconds after which a failed job is deleted and another one is made."""

SUFFIX = "-profile"
_MOST_NAME_CHARACTERS = 40 - len(SUFFIX)


def measuring_job(profile: ClusterProfile, namespace: str) -> PipelineJob:
    """Return the job that measures for the profile. Its data is never read, and its batch size does not matter."""
    spec, name = profile.spec, profile.metadata.name
    return PipelineJob(
        metadata=Metadata(
            name=f"{name[:_MOST_NAME_CHARACTERS]}{SUFFIX}", namespace=namespace, labels={MEASURES_LABEL: name}
        ),
        spec=JobSpec(
            model=spec.model,
            data=DataSpec(
                source="python-stdlib", tokenizer=TokenizerSpec(train="bytes"), sequence_length=spec.sequence_length
            ),
            training=TrainingSpec(global_batch=ANY_GLOBAL_BATCH, steps=1, precision=spec.precision),
            resources=ResourcesSpec(
                device=spec.device,
                ranks=spec.ranks,
                memory_per_rank=spec.memory_per_rank,
                threads_per_rank=spec.threads_per_rank,
            ),
            run_policy=RunPolicySpec(ttl_seconds_after_finished=RETRY_SECONDS),
            kubernetes=KubernetesSpec(
                image=spec.image,
                ranks_per_pod=spec.ranks_per_pod,
                node_selector=spec.node_selector,
                tolerations=spec.tolerations,
                accelerator_resource=spec.accelerator_resource,
            ),
        ),
    )


def summarize(links: tuple[LinkRecord, ...]) -> LinksStatus | None:
    """Summary of the links for the status; none for a single rank, which has no links."""
    if not links:
        return None
    by_speed = sorted(links, key=lambda link: link.bytes_per_second)
    return LinksStatus(
        num_links=len(links),
        slowest=_link(by_speed[0]),
        fastest=_link(by_speed[-1]),
        median_bytes_per_second=median(link.bytes_per_second for link in links),
    )


def _link(link: LinkRecord) -> LinkStatus:
    return LinkStatus(
        source=link.source,
        target=link.target,
        latency_seconds=link.latency_seconds,
        bytes_per_second=link.bytes_per_second,
    )
