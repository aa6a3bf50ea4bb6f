"""The extras of this distribution: which of them brings a package, and what to say where one is missing."""

from __future__ import annotations

from importlib.util import find_spec

from penstock.core.errors import UserError

EXTRAS = {
    "trainer": ("prometheus_client", "safetensors", "tokenizers", "torch"),
    "api": ("alembic", "fastapi", "psycopg", "pydantic", "sqlalchemy", "starlette", "uvicorn"),
    "client": ("httpx",),
}
"""The packages that tell an extra's absence, by their import names; what other extras bring too is told by one."""


def extra_of(package: str | None) -> str | None:
    """The extra that brings a package; none if no extra does."""
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)


def require_trainer() -> None:
    """Raise `UserError` unless what trains is installed here; nothing of it is loaded."""
    missing = next((package for package in EXTRAS["trainer"] if find_spec(package) is None), None)
    if missing is not None:
        raise UserError(
            what=f"training needs the package {missing}, which is not installed on this machine",
            remedy="install penstock with its trainer there: pip install 'penstock[trainer]'",
        )
