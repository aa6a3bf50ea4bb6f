"""What the operator watches, and how the cache hears of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from penstock.kube.names import UID_LABEL
from penstock.kube.resources import BATCH_JOBS, JOBS, JOBSETS, NODES, PODS, Resource
from penstock.kube.transport import Object
from penstock.kube.watching import Watched
from penstock.operator.cache import Cache
from penstock.operator.seen import UNREADABLE, see_jobset, see_node, see_pod, see_ranks_job

log = logging.getLogger(__name__)

T = TypeVar("T")


def watched(cache: Cache) -> list[Watched]:
    """PipelineJobs; JobSets, Jobs and pods of their attempts; and nodes."""
    jobsets = _children(JOBSETS, see_jobset, cache.replace_jobsets, cache.put_jobset, cache.remove_jobset)
    ranks_jobs = _children(
        BATCH_JOBS, see_ranks_job, cache.replace_ranks_jobs, cache.put_ranks_job, cache.remove_ranks_job
    )
    pods = _children(PODS, see_pod, cache.replace_pods, cache.put_pod, cache.remove_pod)
    return [_jobs(cache), replace(jobsets, optional=True), ranks_jobs, pods, _nodes(cache)]


def _jobs(cache: Cache) -> Watched:
    def put(found: Object) -> None:
        cache.put_job(found)

    return Watched(
        resource=JOBS,
        replace=lambda listing: cache.replace_jobs(listing.objects, int(listing.version)),
        put=put,
        remove=lambda found: cache.remove_job(found["metadata"]["uid"]),
    )


def _children(
    resource: Resource,
    see: Callable[[Object], T],
    know: Callable[[Iterable[T], int], None],
    put: Callable[[T], None],
    remove: Callable[[T], None],
) -> Watched:
    return Watched(
        resource=resource,
        selector=UID_LABEL,
        replace=lambda listing: know(_readable(see, listing.objects), int(listing.version)),
        put=_if_readable(see, put),
        remove=_if_readable(see, remove),
    )


def _nodes(cache: Cache) -> Watched:
    return Watched(
        resource=NODES,
        replace=lambda listing: cache.replace_nodes(_readable(see_node, listing.objects)),
        put=_if_readable(see_node, cache.put_node),
        remove=lambda found: cache.remove_node(found["metadata"]["name"]),
    )


def _if_readable(see: Callable[[Object], T], tell: Callable[[T], None]) -> Callable[[Object], None]:
    def told(found: Object) -> None:
        for each in _readable(see, [found]):
            tell(each)

    return told


def _readable(see: Callable[[Object], T], found: Iterable[Object]) -> Iterator[T]:
    """What can be understood. Anybody may make an object with the operator's labels: it must not blind it to others."""
    for each in found:
        try:
            yield see(each)
        except UNREADABLE as error:
            metadata = each.get("metadata", {})
            log.warning("%s/%s cannot be read: %r", metadata.get("namespace"), metadata.get("name"), error)
