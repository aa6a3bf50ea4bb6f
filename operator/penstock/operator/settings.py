"""What an operator is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One operator. ``namespace`` is the only one whose jobs it sees to; all if empty.

    ``image`` is what ranks run in where a job names none. ``service`` is the URL by which pods reach the service;
    ``service_ca`` the certificates that it is trusted by, as text. Without a URL jobs wait at Profiling for ever.
    """

    namespace: str = ""
    image: str = ""
    service: str = ""
    service_ca: str = ""
    num_planners: int = 1
    resync_seconds: float = 60.0
