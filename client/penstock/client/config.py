"""Choice of the service, its token and the certificates to trust: from an argument, the environment, or the file that
`penstock serve` writes.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core import jsontext
from penstock.core.errors import UserError

SERVER, TOKEN, CA = "PENSTOCK_SERVER", "PENSTOCK_TOKEN", "PENSTOCK_CA"


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """URL of a service, a token for it, and the file with the certificates to trust; the system's by default."""

    server: str
    token: str
    ca: Path | None = None


def configuration_file(environment: Mapping[str, str], home: Path) -> Path:
    """The file with this user's service, token and certificates."""
    return Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "penstock" / "service.json"


def configured_server(server: str | None, environment: Mapping[str, str], home: Path) -> str | None:
    """The URL of the chosen service; none if no source names one."""
    return _url(server, environment, _read(configuration_file(environment, home)))


def target(server: str | None, environment: Mapping[str, str], home: Path) -> Target:
    """The chosen service; raises `UserError` if no source names one, or there is no token for it."""
    written = _read(configuration_file(environment, home))
    url = _url(server, environment, written)
    if not url:
        remedy = f"start one with penstock serve, name one with --server URL, or set {SERVER}"
        raise UserError(what="no service is configured", where="--server", remedy=remedy)
    token = environment.get(TOKEN) or (written.get("token") if url == written.get("server") else None)
    if not token:
        remedy = f"set {TOKEN}; an administrator makes tokens: POST /v1/tokens"
        raise UserError(what=f"no token is configured for {url}", where=TOKEN, remedy=remedy)
    ca = environment.get(CA) or (written.get("ca") if url == written.get("server") else None)
    return Target(server=url.rstrip("/"), token=token, ca=Path(ca) if ca else None)


def _url(server: str | None, environment: Mapping[str, str], written: Mapping[str, str]) -> str | None:
    return server or environment.get(SERVER) or written.get("server") or None


def _read(path: Path) -> dict[str, str]:
    try:
        document = jsontext.load(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        remedy = "fix or delete it; penstock token create makes a new token"
        raise UserError(what=f"cannot be read: {error}", where=str(path), remedy=remedy) from None
    return document if isinstance(document, dict) else {}


def trusted(ca: Path | None) -> ssl.SSLContext | bool:
    """Trust only the certificates in the file, regardless of their issuers; without a file, those of httpx.

    Raises:
        UserError: the file does not exist, or contains no certificate.
    """
    if ca is None:
        return True
    try:
        context = ssl.create_default_context(cafile=str(ca))
    except OSError as error:
        remedy = "set it to a PEM file with the certificate of the service or of its authority"
        raise UserError(what=f"cannot be read: {error}", where=f"PENSTOCK_CA {ca}", remedy=remedy) from None
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
