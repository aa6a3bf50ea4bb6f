"""Machines of a lab: each is a set of Linux namespaces (network, PID, mount, UTS) on the host.

A machine lives as long as its init process. When init ends, the kernel ends every other process of the machine and
removes its mounts and interfaces, so `down` leaves no trace. Programs use their usual paths in a machine: /run,
/var/log and the folders of the kubelet and of CNI are private to it, everything else is the host's. The kubelet and
containerd of a node share a machine, because each needs the mounts that the other makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.lab.console import LabError, plain_environ, run, tail, wait_until
from tools.lab.processes import Process, children, command, descendants, find_by_name, process

PRIVATE_FOLDERS = ("/run", "/var/log", "/var/lib/kubelet", "/var/lib/cni")
INIT_PROGRAM = "pause"
UNSHARE_OPTIONS = ("--mount", "--uts", "--net", "--pid", "--fork", "--mount-proc")
SETUP = """set -e
echo "$1" > /proc/sys/kernel/hostname
mount --make-rshared /
private=$2 init=$3
shift 3
for folder in "$@"; do mount --bind "$private$folder" "$folder"; done
ip link set lo up
exec "$init"
"""
BACKGROUND = 'setsid "$@" < /dev/null >> "$0" 2>&1 & echo $!'
"""Shell command that starts a program with the log `$0`. The caller gets no child process to reap."""
START_SECONDS = 20.0
END_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Machine with its init process; ``folder`` contains its private folders and the logs of its programs."""

    name: str
    folder: Path
    init: Process

    @property
    def alive(self) -> bool:
        return self.init.alive

    def nsenter_command(self, *words: str | Path) -> list[str]:
        """Return the command that runs another command in the machine."""
        entry = ["nsenter", "--target", str(self.init.pid), "--mount", "--uts", "--net", "--pid", "--"]
        return [*entry, *map(str, words)]

    def run(self, *words: str | Path, stdin: str | None = None) -> str:
        """Run a program in the machine and return its stdout; raises `LabError` with its last lines if it fails."""
        self._require_alive()
        return run(*self.nsenter_command(*words), stdin=stdin, environ=plain_environ())

    def start(self, program: Path, arguments: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Start a program in the background with these environment variables; its output goes to its log."""
        self._require_alive()
        command_line = self.nsenter_command("sh", "-c", BACKGROUND, self.log(program.name), program, *arguments)
        run(*command_line, environ={**plain_environ(), **(variables or {})})

    def log(self, name: str) -> Path:
        """Return the path of the log of the program with that name."""
        return self.folder / f"{name}.log"

    def programs(self, names: Collection[str]) -> list[Process]:
        """Return the running processes of the machine that have one of these names."""
        return find_by_name(self.init, names) if self.alive else []

    def kill(self, names: Collection[str]) -> None:
        """Kill the programs with these names and wait until they have ended; their child processes keep running."""
        killed = self.programs(names)
        for program in killed:
            program.kill()
        wait_until(lambda: not any(program.alive for program in killed), f"the end of {', '.join(names)}", END_SECONDS)

    def kill_all(self) -> None:
        """Kill every process of the machine except init, so that the machine itself stays."""

        def kill_remaining() -> bool:
            remaining = descendants(self.init.pid)
            for descendant in remaining:
                descendant.kill()
            return bool(remaining)

        wait_until(lambda: not kill_remaining(), f"the end of all processes of {self.name}", END_SECONDS)

    def log_tail(self, name: str) -> str:
        """Return the last log lines of a program, for a message."""
        log = self.log(name)
        return f"{log}:\n{tail(log.read_text(errors='replace'))}" if log.exists() else f"{name} has logged nothing"

    def _require_alive(self) -> None:
        if not self.alive:
            raise LabError(f"{self.name} is not running: ./dev cluster down, then up")

    def stop(self) -> None:
        """End the machine with all its processes."""
        self.init.kill()
        wait_until(lambda: not self.alive, f"the end of {self.name}", END_SECONDS)


def require_namespaces() -> None:
    """Raise `LabError` if the user cannot create namespaces on this host."""
    try:
        run("unshare", *UNSHARE_OPTIONS, "true")
    except LabError as error:
        raise LabError(
            f"root cannot create namespaces here, as in an unprivileged container: run on a host or in a privileged "
            f"container\n{error}"
        ) from error


def start_machine(name: str, folder: Path, init: Path) -> Machine:
    """Start a machine whose init process is the program ``init``; raises `LabError` if it does not start."""
    private = folder / "private"
    for path in PRIVATE_FOLDERS:
        (private / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
    log = folder / "machine.log"
    arguments = (name, str(private), str(init), *PRIVATE_FOLDERS)
    command_line = ["unshare", *UNSHARE_OPTIONS, "sh", "-c", SETUP, "sh", *arguments]
    unshare = process(int(run("sh", "-c", BACKGROUND, log, *command_line, environ=plain_environ())))
    wait_until(
        lambda: unshare is None or not unshare.alive or bool(_init_process(unshare)),
        f"the start of {name}",
        START_SECONDS,
    )
    init_process = None if unshare is None else _init_process(unshare)
    if init_process is None:
        raise LabError(f"{name} did not start\n{tail(log.read_text())}")
    return Machine(name=name, folder=folder, init=init_process)


def _init_process(unshare: Process) -> Process | None:
    """Return the init process once it has set up the machine, which is when it runs `INIT_PROGRAM`."""
    return next((process(pid) for pid in children(unshare.pid) if command(pid) == INIT_PROGRAM), None)


def make_mountpoints(record: Path) -> None:
    """Create the private folders that the host lacks, and append their paths to the file ``record``, parents first."""
    for folder in PRIVATE_FOLDERS:
        for path in (*reversed(Path(folder).parents), Path(folder)):
            if not path.exists():
                with record.open("a") as file:
                    file.write(f"{path}\n")
                path.mkdir()


def remove_mountpoints(record: Path) -> None:
    """Remove the recorded folders that are empty, and the record; no machine that mounts over them may exist."""
    for path in reversed(record.read_text().splitlines() if record.exists() else []):
        with contextlib.suppress(OSError):
            Path(path).rmdir()
    record.unlink(missing_ok=True)
