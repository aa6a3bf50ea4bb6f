"""Where a service and the supervisor of an attempt find each other's files; see `penstock.core.supervision`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.core.supervision import Wish


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """Where both find the files; ``root`` is the run directory."""

    root: Path
    attempt: int

    @property
    def path(self) -> Path:
        """The attempt's folder."""
        return self.root / "attempts" / str(self.attempt)

    @property
    def order(self) -> Path:
        """See `Order`."""
        return self.path / "order.json"

    @property
    def claim(self) -> Path:
        """See `Claim`; made once and never replaced."""
        return self.path / "claim.json"

    @property
    def binding(self) -> Path:
        """See `Binding`."""
        return self.path / "binding.json"

    @property
    def report(self) -> Path:
        """See `AttemptReport`."""
        return self.path / "report.json"

    @property
    def log(self) -> Path:
        """What the supervisor printed."""
        return self.path / "supervisor.log"

    @property
    def shipper_log(self) -> Path:
        """What a shipper printed that the service started after the attempt's end."""
        return self.path / "shipper.log"

    def wish(self, wish: Wish) -> Path:
        """A file that is there once the service asked."""
        return self.path / f"{wish}.wish"


def shipping_lock(root: Path) -> Path:
    """Held by whoever ships the records in the outbox below ``root``, a run directory or a host's part of one."""
    return root / "outbox" / ".lock"
