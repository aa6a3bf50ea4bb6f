"""Measurements and checks for a machine with one GPU, in independent parts, the most valuable first.

    ./dev gpu                  all parts
    ./dev gpu parity memory    these alone
    ./dev gpu --list           what there is
    ./dev gpu --folder DIR     results go there, not to benchmarks/results

Every part runs in separate processes for at most eight minutes and writes ``gpu-PART.json`` when it ends, even if it
failed or timed out. The exit code is 0 if all parts passed, 1 if one did not, 2 if none can run here.

``--device cpu --small`` tests the battery itself: the same code on CPU ranks with a tiny model, without the parts that
need CUDA.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS, Part
from benchmarks.support import RESULTS, machine

LIMIT_SECONDS = 480
"""Time limit of one part."""

LAST_LINES = 40
"""Lines of output that the result of a failed part keeps."""

PASSED, FAILED, CUT_OFF = "passed", "failed", "cut off"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the requested parts and write their results."""
    options = _parser().parse_args(arguments)
    if options.list:
        for part in PARTS.values():
            sys.stdout.write(f"{part.name:10} {part.summary}\n")
        return 0
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        sys.stderr.write(f"no part {', '.join(unknown)}: `./dev gpu --list` shows those there are.\n")
        return 2
    device = _device(options.device)
    if device is None:
        return 2
    wanted = [part for name, part in PARTS.items() if name in options.parts or not options.parts]
    statuses = [_run(part, options, device) for part in wanted if options.device == "cuda" or not part.needs_cuda]
    return int(any(status != PASSED for status in statuses))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./dev gpu", description="measure and check penstock on one GPU")
    parser.add_argument("parts", nargs="*", metavar="PART", help="all if none is named")
    parser.add_argument("--list", action="store_true", help="show the parts")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where results go")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tries the battery itself")
    parser.add_argument("--small", action="store_true", help="a tiny model: shows that parts run, and measures nothing")
    return parser


def _device(kind: str) -> str | None:
    """Name of the device. Prints the reason and returns None if there is none. A separate process queries PyTorch."""
    if kind == "cpu":
        return "cpu"
    question = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '', end='')"
    done = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    if done.returncode == 0 and done.stdout:
        return done.stdout
    reason = next(iter(done.stderr.strip().splitlines()[-1:]), "PyTorch finds no NVIDIA GPU and driver")
    sys.stderr.write(
        f"./dev gpu cannot run here: {reason}.\n"
        "Run it on a machine where `nvidia-smi` shows a GPU; `./dev gpu --list` says what it would do.\n"
    )
    return None


def _run(part: Part, options: argparse.Namespace, device: str) -> str:
    sys.stderr.write(f"{part.name}: {part.summary}\n")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.gpu.measure", part.name, scratch, options.device]
        status, output = _bounded([*command, "small"] if options.small else command)
        answer_found: Any = json.loads(answer.read_text()) if answer.exists() else None
    if status == PASSED and (answer_found is None or not answer_found["passed"]):
        status = FAILED
    result = {
        "part": part.name,
        "status": status,
        "device": device,
        "small": options.small,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine(),
        "seconds": round(time.monotonic() - begin, 1),
        "found": answer_found,
        "output": [] if status == PASSED else output.splitlines()[-LAST_LINES:],
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / f"gpu-{part.name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    sys.stderr.write(f"{part.name}: {status} after {result['seconds']} s, see {path}\n")
    return status


def _bounded(command: Sequence[str]) -> tuple[str, str]:
    """Run a command within the time limit, at which all its processes are killed. Returns its end and its output."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = FAILED if process.wait(LIMIT_SECONDS) else PASSED
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # ranks end with their parent
            process.wait()
            status = CUT_OFF
        output.seek(0)
        return status, output.read()


if __name__ == "__main__":
    sys.exit(main())
