"""State of a running lab: a folder with a JSON file, which lists the lab's rooms (namespaces, `tools.lab.rooms`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.lab.addresses import Addresses
from tools.lab.console import LabError
from tools.lab.control_plane import NAME as CONTROL_PLANE
from tools.lab.processes import Process
from tools.lab.rooms import Room

DEFAULT_NAME = "penstock"
FILE = "lab.json"


@dataclass(frozen=True, kw_only=True)
class State:
    """A lab: its name, its slot (`tools.lab.addresses`), its number of nodes, and the first process of each room.

    ``kubernetes`` is the folder of its Kubernetes programs.
    """

    name: str
    slot: int
    num_nodes: int
    kubernetes: str
    rooms: Mapping[str, Process]

    @property
    def addresses(self) -> Addresses:
        return Addresses(self.slot)

    @property
    def folder(self) -> Path:
        return folder_of(self.name)

    @property
    def certificates(self) -> Path:
        return self.folder / "certificates"

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    @property
    def programs(self) -> Path:
        return Path(self.kubernetes)

    def room(self, machine: str) -> Room:
        """Return the room of a machine; raises `LabError` if the lab has no machine of that name."""
        if machine not in self.rooms:
            nodes = ", ".join(name for name in self.rooms if name != CONTROL_PLANE)
            raise LabError(f"the lab {self.name} has no node '{machine}': one of {nodes}")
        return Room(name=machine, folder=self.folder / machine, first=self.rooms[machine])

    def group(self, machine: str) -> str:
        """Return the name of the control group that contains a node's pods."""
        return f"penstock-lab-{self.name}-{machine}"

    def write(self) -> None:
        """Write the state to the file of the lab, atomically."""
        partial = self.folder / f"{FILE}.partial"
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
        partial.rename(self.folder / FILE)


def labs() -> Path:
    """Return the folder that contains the folders of all labs of this user."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "penstock" / "lab"


def folder_of(name: str) -> Path:
    return labs() / name


def names() -> list[str]:
    """Return the names of this user's labs, sorted."""
    return sorted(path.parent.name for path in labs().glob(f"*/{FILE}"))


def read(name: str) -> State:
    """Return the state of the lab with that name; raises `LabError` if there is none."""
    try:
        found = json.loads((folder_of(name) / FILE).read_text())
    except FileNotFoundError:
        raise LabError(f"there is no lab {name}: ./dev cluster up") from None
    return State(
        name=found["name"],
        slot=found["slot"],
        num_nodes=found["num_nodes"],
        kubernetes=found["kubernetes"],
        rooms={machine: Process(**process) for machine, process in found["rooms"].items()},
    )
