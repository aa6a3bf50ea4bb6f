"""What an extra of this distribution brings, and what is installed here beyond it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.repository import pyproject


def brought_by(extra: str) -> frozenset[str]:
    """The distributions that `pip install penstock[extra]` installs, with all that they need themselves."""
    project = pyproject()["project"]
    waiting = [Requirement(line) for line in [*project["dependencies"], *project["optional-dependencies"][extra]]]
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


def modules_beyond(extra: str) -> frozenset[str]:
    """The modules that are installed here, and would not be if only that extra was."""
    kept = brought_by(extra) | {"penstock"}
    return frozenset(
        module
        for module, distributions in packages_distributions().items()
        if not {canonicalize_name(name) for name in distributions} & kept
    )
