"""Objects that belong to jobs, by the uid of their job, from several sources in any order.

Watches, lists and the answers to the operator's own calls arrive in different threads. An object's version orders
its updates; a deleted object never comes back, because uids are unique.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar

from penstock.operator.snapshots import ChildSnapshot

Child = TypeVar("Child", bound=ChildSnapshot)

Key = tuple[str, str]
"""Namespace and name."""

MOST_REMEMBERED = 20_000
"""Limit of remembered uids. No cluster reports an object after this many later deletions."""


class Gone:
    """The uids of deleted objects."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._uids: OrderedDict[str, None] = OrderedDict()
        self._most = most

    def __contains__(self, uid: str) -> bool:
        return uid in self._uids

    def add(self, uid: str) -> None:
        """Add the uid, and drop the oldest."""
        self._uids[uid] = None
        while len(self._uids) > self._most:
            self._uids.popitem(last=False)


class Children(Generic[Child]):
    """The children of all jobs, of one kind, by namespace and name. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[str, dict[Key, Child]] = {}
        self._gone = Gone()

    def of(self, job_uid: str) -> tuple[Child, ...]:
        """Return the children of one job, sorted by namespace and name."""
        children = self._of.get(job_uid, {})
        return tuple(children[key] for key in sorted(children))

    def get(self, child: Child) -> Child | None:
        """Return the stored version of the child."""
        known = self._of.get(child.job_uid, {}).get(_key(child))
        return known if known is not None and known.uid == child.uid else None

    def put(self, child: Child) -> bool:
        """Store the child, unless a newer version is stored; return whether it is a change."""
        known = self._of.get(child.job_uid, {}).get(_key(child))
        if child.uid in self._gone or (known is not None and known.version > child.version):
            return False
        self._of.setdefault(child.job_uid, {})[_key(child)] = child
        return known != child

    def remove(self, child: Child) -> bool:
        """Remove the child, unless it was replaced by another of its name; return whether it is a change."""
        self._gone.add(child.uid)
        children = self._of.get(child.job_uid, {})
        known = children.get(_key(child))
        if known is None or known.uid != child.uid:
            return False
        del children[_key(child)]
        if not children:
            del self._of[child.job_uid]
        return True

    def replace(self, children: Iterable[Child], version: int) -> set[str]:
        """Store these, which are all children at ``version``; return the uids of jobs with changes."""
        listed: dict[str, list[Child]] = {}
        for child in children:
            listed.setdefault(child.job_uid, []).append(child)
        return {uid for uid in self._of.keys() | listed.keys() if self.replace_of(uid, listed.get(uid, []), version)}

    def replace_of(self, job_uid: str, listed: Iterable[Child], version: int, namespace: str = "") -> bool:
        """Store these, which are all children of one job at ``version``, in one namespace or in all; return whether
        that is a change.
        """
        there = {_key(child): child for child in listed}
        missing = [
            child
            for key, child in self._of.get(job_uid, {}).items()
            if key not in there and child.version <= version and namespace in ("", child.namespace)
        ]
        changes = [self.remove(child) for child in missing] + [self.put(child) for child in there.values()]
        return any(changes)


def _key(child: ChildSnapshot) -> Key:
    return child.namespace, child.name
