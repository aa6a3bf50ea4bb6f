"""Distributions of penstock that may be missing on a machine: the packages of each, and how to install it."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.core.errors import UserError

MEMBERS = {
    "penstock-trainer": ("penstock.trainer", "prometheus_client", "safetensors", "tokenizers", "torch"),
    "penstock-api": (
        "penstock.api",
        *("alembic", "fastapi", "psycopg", "pydantic", "sqlalchemy", "starlette", "uvicorn"),
    ),
    "penstock-agent": ("penstock.agent", "penstock.planner", "numba", "numpy", "scipy"),
    "penstock-kube": ("penstock.kube", "kubernetes"),
    "penstock-client": ("penstock.client", "httpx"),
}
"""Packages whose absence shows that a distribution is missing; packages of several distributions are listed once."""


def member_of(package: str | None) -> str | None:
    """The distribution of penstock that provides a package; None if none does."""
    return next((member for member, packages in MEMBERS.items() if package in packages), None)


def absent_member(error: Exception) -> UserError | None:
    """The mistake behind a failed import of a distribution that is not installed here; None for any other error."""
    package = error.name if isinstance(error, ModuleNotFoundError) else None
    member = member_of(package)
    if member is None:
        return None
    remedy = f"install {member}: {installing(member)}"
    return UserError(what=f"this command needs the package {package}", remedy=remedy)


def installing(member: str) -> str:
    """The command that installs a distribution from penstock's wheels, without a package index."""
    return f"pip install --constraint WHEELS/penstock.txt {member}"


def require_trainer() -> None:
    """Raise `UserError` unless the trainer is installed here; nothing of it is loaded."""
    member = "penstock-trainer"
    missing = next((package for package in MEMBERS[member] if find_spec(package) is None), None)
    if missing is not None:
        raise UserError(
            what=f"training needs the package {missing}, which is not installed on this machine",
            remedy=f"install {member} there: {installing(member)}",
        )
