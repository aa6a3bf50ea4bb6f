"""Check of this machine for training, with remedies: `penstock doctor`."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from penstock.agent.probe import run_probe
from penstock.agent.trial import MOST_RANKS, try_ranks
from penstock.cli import output
from penstock.cli.output import Lines
from penstock.core.errors import RunError
from penstock.core.host.members import installing
from penstock.core.job import Device
from penstock.core.manifest import Manifest
from penstock.core.model import Family, ModelSpec
from penstock.core.probe import ProbeRequest
from penstock.core.units import format_bytes

LEAST_FREE_BYTES = 2 * 10**9
LEAST_OPEN_FILES = 1024
TRAINING = ("core", "planner", "view", "client", "agent", "trainer", "cli")
"""Distributions that training on this machine needs, and the command line."""

_SMALL = ModelSpec(family=Family.GPT2, layers=1, hidden=8, heads=1, vocab=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(Manifest):
    """Result of one check: the value that was found, and a remedy if it is a problem."""

    name: str
    found: str
    remedy: str = ""

    @property
    def fine(self) -> bool:
        """Whether the check has passed."""
        return not self.remedy


def examine(folder: Path, device: Device | None = None) -> list[Finding]:
    """Run all checks. ``folder`` is the folder of runs; ranks are tested on ``device``, or on every kind of device
    here.
    """
    return [
        _python(),
        Finding(name="system", found=f"{platform.system()} {platform.release()} on {platform.machine()}"),
        Finding(name="cores", found=f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"),
        Finding(name="memory", found=format_bytes(_memory_bytes())),
        _disk(folder),
        _open_files(),
        _loopback(),
        *_packages(),
        *_devices(device),
    ]


def _python() -> Finding:
    remedy = "" if sys.version_info >= (3, 11) else "use Python 3.11 or newer"
    return Finding(name="python", found=f"{platform.python_version()} ({sys.executable})", remedy=remedy)


def _memory_bytes() -> int:
    """Memory that processes may use: the machine's, or the smaller limit of a control group."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        if path.exists() and (limit := path.read_text().strip()).isdecimal():
            return min(machine, int(limit))
    return machine


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    remedy = "free some space, or run from another disk" if free < LEAST_FREE_BYTES else ""
    return Finding(name="disk", found=f"{format_bytes(free)} free in {folder}", remedy=remedy)


def _open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = limit != resource.RLIM_INFINITY and limit < LEAST_OPEN_FILES
    return Finding(name="open files", found=str(limit), remedy=f"ulimit -n {LEAST_OPEN_FILES}" if few else "")


def _loopback() -> Finding:
    """Check the loopback interface, by which ranks on one machine connect."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        remedy = "bring the loopback interface up: ip link set lo up"
        return Finding(name="network", found=f"no loopback: {error.strerror}", remedy=remedy)
    return Finding(name="network", found="loopback works")


def _packages() -> list[Finding]:
    """Check distributions of penstock that run jobs here, and the requirements of the installed ones."""
    findings, needed = [], dict[str, str]()
    for member in (f"penstock-{name}" for name in TRAINING):
        try:
            requirements = requires(member) or ()
        except PackageNotFoundError:
            findings.append(Finding(name=member, found="missing", remedy=installing(member)))
            continue
        for requirement in requirements:
            name = re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0]
            if not name.startswith("penstock-") and "extra ==" not in requirement:
                needed.setdefault(name, requirement.partition(";")[0].strip())
    return findings + [_package(name, requirement) for name, requirement in sorted(needed.items())]


def _package(name: str, requirement: str) -> Finding:
    try:
        return Finding(name=name, found=version(name))
    except PackageNotFoundError:
        return Finding(name=name, found="missing", remedy=f"pip install '{requirement}'")


def _devices(device: Device | None) -> list[Finding]:
    """Check devices that PyTorch can use; nothing if PyTorch or the trainer is missing, which is a separate finding."""
    if find_spec("torch") is None or find_spec("penstock.trainer") is None:
        return []
    try:
        answer = run_probe(ProbeRequest(device=Device.CPU, threads_per_rank=1, model=_SMALL, sequence_length=1))
    except RunError as error:
        return [
            Finding(name="pytorch", found=str(error), remedy="install it again: pip install --force-reinstall torch")
        ]
    assert answer.key is not None, "the processor is always there"
    count = answer.num_cuda_devices
    remedy = ""
    if device is Device.CUDA and not count:
        remedy = "install the NVIDIA driver and a PyTorch built for CUDA, or leave out --device cuda"
    devices = f"{count} devices" if count else "no device; jobs run with device: cpu"
    findings = [
        Finding(name="processor", found=answer.key.device),
        Finding(name="cuda", found=devices, remedy=remedy),
    ]
    if device is not Device.CUDA:
        findings.append(_tried(Device.CPU, MOST_RANKS))
    if device is not Device.CPU and count:
        findings.append(_tried(Device.CUDA, min(count, MOST_RANKS)))
    return findings


def _tried(device: Device, num_ranks: int) -> Finding:
    """Test ranks on the device, started like those of a job."""
    name = f"trial on {device.value}"
    try:
        trial = try_ranks(device, num_ranks)
    except RunError as error:
        return Finding(name=name, found=str(error), remedy=_TRIAL_REMEDIES[device])
    return Finding(name=name, found=f"{trial.done}, in {trial.seconds:.1f} s")


_TRIAL_REMEDIES = {
    Device.CPU: "see whether this PyTorch works alone: python -c 'import torch; print(torch.ones(1) + 1)'",
    Device.CUDA: "compare the driver that nvidia-smi names with what this PyTorch needs, torch.version.cuda",
}


def rendered(findings: Sequence[Finding]) -> Lines:
    """Return the findings for a terminal."""
    table = output.table(show_header=False, padding=(0, 1))
    for finding in findings:
        mark = ("ok", "green") if finding.fine else ("!!", "bold red")
        remedy = "" if finding.fine else f"\nremedy: {finding.remedy}"
        table.add_row(
            output.text(mark), output.text((finding.name, "bold")), output.text(finding.found, (remedy, "green"))
        )
    wrong = sum(not finding.fine for finding in findings)
    closing = "ready to train" if not wrong else f"{wrong} of {len(findings)} need attention"
    return [table, output.text((closing, "bold"))]
