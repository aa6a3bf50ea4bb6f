"""What members of the workspace install, and what is installed here beyond that."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.repository import members, packages

SERVICE = ("penstock-cli[serve]",)
"""What serves on a machine of its own."""

IMAGES = {"operator": ("penstock-operator",), "api": ("penstock-cli[cluster]",), "trainer": ("penstock-agent[run]",)}
"""What the Dockerfile's targets install, which `tests/architecture/test_images.py` holds to it."""


@cache
def distributions() -> dict[str, frozenset[str]]:
    """The names of the distributions that hold a package, by the package's name."""
    return {name: frozenset(map(canonicalize_name, found)) for name, found in packages_distributions().items()}


def brought_by(*requirements: str) -> frozenset[str]:
    """The distributions that an installation of these has, with all that they need themselves."""
    waiting = [Requirement(line) for line in requirements]
    found: dict[str, set[str]] = {}
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), requirement.extras | {""}
        if extras <= found.setdefault(name, set()):
            continue
        found[name] |= extras
        waiting += [each for each in _required(name) if _applies(each, extras)]
    return frozenset(found)


def _required(name: str) -> list[Requirement]:
    try:
        return [Requirement(line) for line in requires(name) or ()]
    except PackageNotFoundError:  # for another system
        return []


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)


def modules_beyond(*requirements: str) -> frozenset[str]:
    """The modules that are installed here, and would not be if only these were; our own by their full names."""
    kept = brought_by(*requirements)
    others = {module for module, holding in distributions().items() if not holding & kept}
    ours = {
        f"penstock.{package}"
        for member in members()
        for package in packages_of(member)
        if f"penstock-{member}" not in kept
    }
    return frozenset(others - {"penstock"} | ours)


def packages_of(member: str) -> list[str]:
    """The packages directly below the namespace that a member holds."""
    return [name for name, folder in packages().items() if folder.parents[1].name == member]
