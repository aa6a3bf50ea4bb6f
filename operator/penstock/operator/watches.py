"""Watches of the operator, and their updates of the cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from penstock.kube.names import UID_LABEL
from penstock.kube.resources import JOBSETS, NODES, Resource
from penstock.kube.transport import Object
from penstock.kube.watching import Watched
from penstock.operator.cache import Cache
from penstock.operator.snapshots import CHILDREN, UNREADABLE, ChildSnapshot, node_snapshot

log = logging.getLogger(__name__)

T = TypeVar("T")


def watched(cache: Cache) -> list[Watched]:
    """Watches of nodes, and of the JobSets, Jobs and pods of attempts.

    kopf watches PipelineJobs (`penstock.operator.handlers`).
    """
    children = (_children(cache, resource, kind, extract) for resource, kind, extract in CHILDREN)
    return [*children, _nodes(cache)]


def _children(
    cache: Cache, resource: Resource, kind: type[ChildSnapshot], extract: Callable[[Object], ChildSnapshot]
) -> Watched:
    return Watched(
        resource=resource,
        selector=UID_LABEL,
        replace=lambda listing: cache.replace_children(kind, _readable(extract, listing.objects), int(listing.version)),
        put=_if_readable(extract, cache.put_child),
        remove=_if_readable(extract, cache.remove_child),
        optional=resource is JOBSETS,
    )


def _nodes(cache: Cache) -> Watched:
    return Watched(
        resource=NODES,
        replace=lambda listing: cache.replace_nodes(_readable(node_snapshot, listing.objects)),
        put=_if_readable(node_snapshot, cache.put_node),
        remove=lambda item: cache.remove_node(item["metadata"]["name"]),
    )


def _if_readable(extract: Callable[[Object], T], put: Callable[[T], None]) -> Callable[[Object], None]:
    def put_readable(item: Object) -> None:
        for snapshot in _readable(extract, [item]):
            put(snapshot)

    return put_readable


def _readable(extract: Callable[[Object], T], items: Iterable[Object]) -> Iterator[T]:
    """Yield snapshots of the readable items. An unreadable one, which any user may create, must not hide the others."""
    for item in items:
        try:
            yield extract(item)
        except UNREADABLE as error:
            metadata = item.get("metadata", {})
            log.warning(
                "%s %s/%s is ignored, because it cannot be read: %r",
                item.get("kind", "object"),
                metadata.get("namespace"),
                metadata.get("name"),
                error,
            )
