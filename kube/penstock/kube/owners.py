"""Owner references: which object controls another, and in which kind."""

from __future__ import annotations

from penstock.kube.transport import Object


def controller(owned: Object, kind: str, group: str) -> tuple[str, str]:
    """Name and uid of the object of that kind which controls ``owned``; empty strings if there is none.

    An owner that does not control it does not count: anything may have several owners, and one controller.
    """
    for owner in owned["metadata"].get("ownerReferences") or ():
        is_kind = owner["kind"] == kind and owner["apiVersion"].partition("/")[0] == group
        if is_kind and owner.get("controller"):
            return str(owner["name"]), str(owner["uid"])
    return "", ""
