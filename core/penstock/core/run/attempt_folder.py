"""Files by which a service and the supervisor of an attempt communicate (`penstock.core.supervision`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.core.supervision import SupervisorRequest


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """Paths of these files; ``root`` is the run directory."""

    root: Path
    attempt: int

    @property
    def path(self) -> Path:
        """The attempt's folder."""
        return self.root / "attempts" / str(self.attempt)

    @property
    def order(self) -> Path:
        """What to supervise, from the service."""
        return self.path / "order.json"

    @property
    def claim(self) -> Path:
        """The supervisor's process; made once and never replaced."""
        return self.path / "claim.json"

    @property
    def binding(self) -> Path:
        """The plan to train by, from the service."""
        return self.path / "binding.json"

    @property
    def report(self) -> Path:
        """The state of the attempt, from the supervisor."""
        return self.path / "report.json"

    @property
    def log(self) -> Path:
        """Output of the supervisor."""
        return self.path / "supervisor.log"

    @property
    def shipper_log(self) -> Path:
        """Output of a shipper that the service started after the attempt's end."""
        return self.path / "shipper.log"

    def request(self, request: SupervisorRequest) -> Path:
        """A file that exists once the service has sent the request."""
        return self.path / f"{request}.wish"  # the name that supervisors of 0.1.0 poll


def shipping_lock(root: Path) -> Path:
    """Held by the process that ships records of the outbox below ``root``, a run directory or a host's part of one."""
    return root / "outbox" / ".lock"
