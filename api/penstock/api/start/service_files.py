"""Files in a service's folder: its identity, and the address and token for reports of its attempts."""

from __future__ import annotations

import uuid
from pathlib import Path

from penstock.api.auth.identity import Identity, Role
from penstock.api.service import Service
from penstock.api.settings import Settings
from penstock.api.store import tokens
from penstock.core.serialization.files import write_atomically, write_secret
from penstock.core.serialization.manifest_files import write
from penstock.core.supervision import Address


def ca_file(settings: Settings) -> Path | None:
    """Return the certificate that clients on this machine trust: the service's own, regardless of its issuer."""
    return settings.tls.certificate if settings.tls else None


def address_file(settings: Settings) -> Path:
    """Write the file with this service's address for attempts; return its path."""
    path = settings.folder / "address.json"
    write(path, Address(server=settings.url, ca_file=str(ca_file(settings) or "")))
    return path


def ingest_token(service: Service) -> Path:
    """Return the file of a token for attempts' reports, with a new token if the current one is not valid."""
    path = service.settings.folder / "ingest-token"
    if not _opens(service, path):
        reporter = Identity(name="local-attempts", role=Role.INGEST)
        _, secret = service.write("tokens", lambda connection: tokens.add(connection, reporter, service.clock()))
        write_secret(path, secret + "\n")
    return path


def _opens(service: Service, path: Path) -> bool:
    """Whether the token in the file is valid in this database, which may be another one than at the last start."""
    try:
        secret = path.read_text().strip()
    except (FileNotFoundError, UnicodeDecodeError):
        return False
    token = service.read(lambda connection: tokens.by_secret(connection, secret))
    return token is not None and token.valid(service.clock()) and token.identity.may(Role.INGEST)


def executor_name(settings: Settings) -> str:
    """Return the executor's name. The folder stores it, because its jobs keep it when machine or folder are renamed."""
    path = settings.folder / "executor"
    if not path.exists():
        write_atomically(path, f"{settings.machine}:{settings.folder}\n")
    return path.read_text().strip()


def planner_name(settings: Settings) -> str:
    """Return the planning worker's name, the same at every start, so that a service finds its own requests again."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{settings.machine}:{settings.folder}"))
