"""Same-origin check by the Origin header."""

from __future__ import annotations

from urllib.parse import urlsplit

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
DEFAULT_PORTS = {"http": 80, "https": 443}


def same_origin(origin: str | None, scheme: str, host: str) -> bool:
    """Whether ``origin`` names this scheme, host and port.

    A missing header does not: every browser sends it with requests other than GET, and only browsers send the cookie.
    """
    return (
        origin is not None and (requested := _place(f"{scheme}://{host}")) is not None and _place(origin) == requested
    )


def _place(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port of an origin; none for ``null`` and for a URL with more parts."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or parts.path or parts.query or parts.fragment:
        return None
    if "@" in parts.netloc:
        return None
    return parts.scheme, parts.hostname, DEFAULT_PORTS[parts.scheme] if port is None else port
