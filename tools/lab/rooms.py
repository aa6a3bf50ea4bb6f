"""Rooms: namespaces of network, processes, mounts and host name, one room for each machine of a lab.

A room lives as long as its first process. Whatever was started in it, mounted in it or plugged into it is gone with
that one, which is why `down` leaves no trace. Programs find their usual paths in a room: /run, /var/log and the folders
of the kubelet and of CNI are the room's own, all else is this machine's. The kubelet and containerd of a node share a
room; apart, neither would see what the other mounts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.lab.console import LabError, plain_environ, run, tail, wait_until
from tools.lab.processes import Process, children, command, descendants, named, process

OWN_FOLDERS = ("/run", "/var/log", "/var/lib/kubelet", "/var/lib/cni")
FIRST = "pause"
NEW = ("--mount", "--uts", "--net", "--pid", "--fork", "--mount-proc")
SETUP = """set -e
echo "$1" > /proc/sys/kernel/hostname
mount --make-rshared /
own=$2 first=$3
shift 3
for folder in "$@"; do mount --bind "$own$folder" "$folder"; done
ip link set lo up
exec "$first"
"""
BACKGROUND = 'setsid "$@" < /dev/null >> "$0" 2>&1 & echo $!'
"""Leaves no child behind that somebody would have to wait for; `$0` is the log."""
START_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Room:
    """A room of that name; its own folders and logs lie in ``folder``."""

    name: str
    folder: Path
    first: Process

    @property
    def alive(self) -> bool:
        return self.first.alive

    def inside(self, *words: str | Path) -> list[str]:
        """The command that runs another one in the room."""
        entry = ["nsenter", "--target", str(self.first.pid), "--mount", "--uts", "--net", "--pid", "--"]
        return [*entry, *map(str, words)]

    def run(self, *words: str | Path, stdin: str | None = None) -> str:
        """What a program prints in the room; raises `LabError` with its last words when it fails."""
        self._require()
        return run(*self.inside(*words), stdin=stdin, environ=plain_environ())

    def start(self, program: Path, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Start a program that stays, with these variables; what it says goes to its log."""
        self._require()
        line = self.inside("sh", "-c", BACKGROUND, self.log(program.name), program, *arguments)
        run(*line, environ={**plain_environ(), **(variables or {})})

    def log(self, name: str) -> Path:
        """Where the program of that name says what it does."""
        return self.folder / f"{name}.log"

    def programs(self, names: Collection[str]) -> list[Process]:
        """Those of the named programs that run in the room."""
        return named(self.first, names) if self.alive else []

    def kill(self, names: Collection[str]) -> None:
        """End these programs at once and return when they are gone; what they started goes on."""
        found = self.programs(names)
        for each in found:
            each.kill()
        wait_until(lambda: not any(each.alive for each in found), f"the end of {', '.join(names)}", START_SECONDS)

    def empty(self) -> None:
        """End everything in the room at once but its first process, which is the room."""

        def left() -> bool:
            found = descendants(self.first.pid)
            for each in found:
                each.kill()
            return bool(found)

        wait_until(lambda: not left(), f"the end of all that runs in {self.name}", START_SECONDS)

    def log_tail(self, name: str) -> str:
        """Return the last log lines of a program, for a message."""
        log = self.log(name)
        return f"{log}:\n{tail(log.read_text(errors='replace'))}" if log.exists() else f"{name} has logged nothing"

    def _require(self) -> None:
        if not self.alive:
            raise LabError(f"{self.name} is not running: ./dev cluster down, then up")

    def close(self) -> None:
        """End everything in the room."""
        self.first.kill()
        wait_until(lambda: not self.alive, f"the end of {self.name}", START_SECONDS)


def require() -> None:
    """Refuse a machine on which there can be no rooms; raises `LabError`."""
    try:
        run("unshare", *NEW, "true")
    except LabError as error:
        raise LabError(f"root may not make namespaces here, as in a container without privileges\n{error}") from error


def open_room(name: str, folder: Path, first: Path) -> Room:
    """A new room whose first process is the program ``first``, which waits; raises `LabError` if it does not start."""
    own = folder / "own"
    for path in OWN_FOLDERS:
        (own / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    command_line = ["unshare", *NEW, "sh", "-c", SETUP, "sh", name, str(own), str(first), *OWN_FOLDERS]
    outer = process(int(run("sh", "-c", BACKGROUND, folder / "room.log", *command_line, environ=plain_environ())))
    wait_until(lambda: outer is None or not outer.alive or bool(_first(outer)), f"the start of {name}", START_SECONDS)
    found = None if outer is None else _first(outer)
    if found is None:
        raise LabError(f"{name} did not start\n{tail((folder / 'room.log').read_text())}")
    return Room(name=name, folder=folder, first=found)


def _first(outer: Process) -> Process | None:
    """The room's first process, once it has set up the room."""
    return next((process(pid) for pid in children(outer.pid) if command(pid) == FIRST), None)


def make_mountpoints(note: Path) -> None:
    """Make the folders that a room covers and that this machine lacks, and note which those were, parents first."""
    for folder in OWN_FOLDERS:
        for path in (*reversed(Path(folder).parents), Path(folder)):
            if not path.exists():
                with note.open("a") as file:
                    file.write(f"{path}\n")
                path.mkdir()


def remove_mountpoints(note: Path) -> None:
    """Remove what is noted, where it is still empty, and the note; no room may be left that covers them."""
    for path in reversed(note.read_text().splitlines() if note.exists() else []):
        with contextlib.suppress(OSError):
            Path(path).rmdir()
    note.unlink(missing_ok=True)
