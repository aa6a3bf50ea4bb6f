"""Administration of a service's database without the service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from penstock.api.auth.identity import Identity, Role
from penstock.api.service import Service, open_service
from penstock.api.settings import Settings
from penstock.api.store import backup, migrate, tokens
from penstock.api.store.engine import is_sqlite, make_engine, parse_url
from penstock.api.store.tokens import NoSuchTokenError
from penstock.core.errors import UserError
from penstock.core.serialization.files import SECRET, writing


def settings_of(folder: Path, database: str) -> Settings:
    """Return the settings of the service with that folder and database; raises `UserError` if there is none."""
    settings = Settings(folder=folder.absolute(), database=database)
    url = parse_url(settings.database_url)
    if is_sqlite(url) and not Path(url.database or "").is_file():
        raise UserError(
            what="is not a database of a service",
            where=str(url.database),
            remedy="name the service's folder with --folder, or create the database by starting the service: "
            "penstock serve",
        )
    return settings


@contextmanager
def opened(folder: Path, database: str) -> Iterator[Service]:
    """Open the store of the service, without a time limit for statements."""
    service = open_service(settings_of(folder, database), statement_seconds=None)
    try:
        yield service
    finally:
        service.close()


def new_token(service: Service, name: str, role: str, namespace: str | None, lifetime_seconds: float | None) -> str:
    """Create a token; return its secret."""
    bearer = Identity(name=name, role=Role(role), namespace=namespace)
    _, secret = service.write("tokens", lambda c: tokens.add(c, bearer, service.clock(), lifetime_seconds))
    return secret


def close_token(service: Service, token: str) -> None:
    """Revoke the token; raises `UserError` if there is none."""
    try:
        service.write("tokens", lambda c: tokens.revoke(c, token, service.clock()))
    except NoSuchTokenError:
        raise UserError(
            what="is not the id of a token", where=token, remedy="penstock token list shows the ids of all tokens"
        ) from None


def list_tokens(service: Service) -> list[dict[str, str | None]]:
    """Return all tokens as data, without their secrets."""
    return [_data(token, service.clock()) for token in service.read(tokens.every)]


def _data(token: tokens.StoredToken, now: float) -> dict[str, str | None]:
    return {
        "id": token.id,
        "name": token.name,
        "role": token.role.value,
        "namespace": token.namespace,
        "state": "valid" if token.valid(now) else "revoked" if token.revoked_at is not None else "expired",
        "createdAt": _instant(token.created_at),
        "expiresAt": _instant(token.expires_at),
    }


def _instant(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def upgrade(folder: Path, database: str) -> tuple[str | None, str | None]:
    """Upgrade the schema; return its revision before and after."""
    engine = make_engine(parse_url(settings_of(folder, database).database_url))
    try:
        before = migrate.current(engine)
        migrate.upgrade(engine)
        return before, migrate.current(engine)
    finally:
        engine.dispose()


def back_up(folder: Path, database: str, file: Path) -> int:
    """Write the whole database to a file; return the number of rows. A service may run meanwhile."""
    with opened(folder, database) as service:
        try:
            with writing(file, mode=SECRET) as target:
                return backup.back_up(service.engine, target)
        except OSError as error:
            raise UserError(
                what=f"cannot be written: {error.strerror}",
                where=str(file),
                remedy="name a file in a folder that exists and has free space",
            ) from None


def restore(folder: Path, database: str, file: Path) -> int:
    """Fill a database that is new or empty; return the number of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    engine = make_engine(parse_url(Settings(folder=folder.absolute(), database=database).database_url))
    try:
        if migrate.current(engine) is None:
            migrate.upgrade(engine)
        return backup.restore(engine, file)
    finally:
        engine.dispose()
