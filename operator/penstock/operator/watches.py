"""What the operator watches beside the jobs themselves, and how the cache hears of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from penstock.core.errors import UserError
from penstock.kube.names import UID_LABEL
from penstock.kube.resources import JOBSETS, NODES, PODS
from penstock.kube.transport import Listing, Object
from penstock.kube.watching import Watched
from penstock.operator.cache import Cache
from penstock.operator.seen import see_jobset, see_node, see_pod

log = logging.getLogger(__name__)

T = TypeVar("T")


def watched(cache: Cache) -> list[Watched]:
    """JobSets and pods of attempts, and nodes."""
    return [_jobsets(cache), _pods(cache), _nodes(cache)]


def _jobsets(cache: Cache) -> Watched:
    def replace(listing: Listing) -> None:
        cache.replace_jobsets(_readable(see_jobset, listing.objects), int(listing.version))

    return Watched(
        resource=JOBSETS,
        selector=UID_LABEL,
        optional=True,
        replace=replace,
        put=_if_readable(see_jobset, cache.put_jobset),
        remove=_if_readable(see_jobset, cache.remove_jobset),
    )


def _pods(cache: Cache) -> Watched:
    def replace(listing: Listing) -> None:
        cache.replace_pods(_readable(see_pod, listing.objects), int(listing.version))

    return Watched(
        resource=PODS,
        selector=UID_LABEL,
        replace=replace,
        put=_if_readable(see_pod, cache.put_pod),
        remove=_if_readable(see_pod, cache.remove_pod),
    )


def _nodes(cache: Cache) -> Watched:
    def replace(listing: Listing) -> None:
        cache.replace_nodes(_readable(see_node, listing.objects))

    return Watched(
        resource=NODES,
        replace=replace,
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
        except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:
            metadata = each.get("metadata", {})
            log.warning("%s/%s cannot be read: %r", metadata.get("namespace"), metadata.get("name"), error)
