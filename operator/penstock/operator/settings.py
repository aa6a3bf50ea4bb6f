"""What an operator is told when it starts, by its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One operator. ``namespace`` is the only one whose jobs it sees to; all if empty.

    ``image`` is what ranks run in where a job names none. ``service`` is the URL by which pods reach the service;
    ``service_ca`` the certificates that it is trusted by, as text. Without a URL jobs wait at Profiling for ever.
    ``own_namespace`` is where the operator and the service live.
    """

    own_namespace: str = "penstock-system"
    namespace: str = ""
    image: str = ""
    service: str = ""
    service_ca: str = ""
    num_planners: int = 1
    resync_seconds: float = 60.0


def settings_from(environment: Mapping[str, str]) -> Settings:
    """What the variables PENSTOCK_... say; raises `UserError` for what cannot be used."""
    ca_file = environment.get("PENSTOCK_SERVICE_CA_FILE", "")
    try:
        service_ca = Path(ca_file).read_text() if ca_file else ""
        num_planners = int(environment.get("PENSTOCK_PLANNERS", "1"))
    except OSError as error:
        what, remedy = f"cannot be read: {error.strerror}", "mount it, or leave the variable out"
        raise UserError(what=what, where="PENSTOCK_SERVICE_CA_FILE", remedy=remedy) from None
    except ValueError:
        raise UserError(what="is no number", where="PENSTOCK_PLANNERS", remedy="write 1") from None
    return Settings(
        own_namespace=environment.get("PENSTOCK_OWN_NAMESPACE", "penstock-system"),
        namespace=environment.get("PENSTOCK_NAMESPACE", ""),
        image=environment.get("PENSTOCK_TRAINER_IMAGE", ""),
        service=environment.get("PENSTOCK_SERVICE_URL", ""),
        service_ca=service_ca,
        num_planners=num_planners,
    )
