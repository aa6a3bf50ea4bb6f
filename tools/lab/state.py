"""State of a running lab: a folder with a JSON file, which lists the lab's machines (`tools.lab.machines`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.lab.addresses import Addresses
from tools.lab.console import LabError
from tools.lab.control_plane import NAME as CONTROL_PLANE
from tools.lab.machines import Machine
from tools.lab.processes import Process

DEFAULT_NAME = "penstock"
FILE = "lab.json"


@dataclass(frozen=True, kw_only=True)
class State:
    """A lab: its name, its slot (`tools.lab.addresses`), its number of nodes, and the init process of each machine.

    ``kubernetes`` is the folder of its Kubernetes programs.
    """

    name: str
    slot: int
    num_nodes: int
    kubernetes: str
    machines: Mapping[str, Process]

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

    def machine(self, name: str) -> Machine:
        """Return the machine with that name; raises `LabError` if the lab has none."""
        if name not in self.machines:
            nodes = ", ".join(machine for machine in self.machines if machine != CONTROL_PLANE)
            raise LabError(f"the lab {self.name} has no node '{name}': use one of {nodes}")
        return Machine(name=name, folder=self.folder / name, init=self.machines[name])

    def cgroup(self, name: str) -> str:
        """Return the name of the control group that contains the pods of the node ``name``."""
        return f"penstock-lab-{self.name}-{name}"

    def write(self) -> None:
        """Write the state to the lab's file, atomically."""
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
        fields = json.loads((folder_of(name) / FILE).read_text())
    except FileNotFoundError:
        raise LabError(f"there is no lab {name}: start it by ./dev cluster up --name {name}") from None
    return State(
        name=fields["name"],
        slot=fields["slot"],
        num_nodes=fields["num_nodes"],
        kubernetes=fields["kubernetes"],
        machines={machine: Process(**process) for machine, process in fields["machines"].items()},
    )
