"""Time until `penstock serve` answers, and its memory when idle, with and without torch installed.

Run as ``python -m benchmarks.service_start``; writes ``benchmarks/results/service_start.{md,json}``. The environment
without torch is made from constraints.txt, with the packages of the service's image.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from benchmarks.support import write_results

from tools.dev.wheels import build

ROOT = Path(__file__).parents[1]
REPEATS = 5
IDLE_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
GPT3 = ("deploy/examples/gpt3-175b.yaml", "--cluster", "deploy/examples/gpt3-175b-cluster.yaml")


def environment_without_torch(folder: Path) -> Path:
    """Create an environment without torch. Returns its folder of programs."""
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    wheels = build(folder.parent / "wheels")
    wanted = ["penstock-cli[serve]", "--constraint", str(ROOT / "constraints.txt"), "--constraint", str(wheels)]
    python = str(folder / "bin" / "python")
    install = [*uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", python]  # compiled, as pip leaves it
    subprocess.run([*install, *wanted], check=True)
    return folder / "bin"


def start_once(penstock: Path, folder: Path) -> dict[str, float]:
    """Start the service once. Returns seconds to the first answer, and memory a while later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {"XDG_CONFIG_HOME": str(folder / "config"), "XDG_STATE_HOME": str(folder / "state")}
    environment = {**os.environ, **own}
    command = [str(penstock), "serve", "--folder", str(folder / "data"), "--port", str(port)]
    begin = time.perf_counter()
    with subprocess.Popen(command, env=environment, cwd=folder, stderr=subprocess.DEVNULL) as process:
        while not answers(f"http://127.0.0.1:{port}/readyz"):
            if process.poll() is not None or time.perf_counter() > begin + PATIENCE_SECONDS:
                raise SystemExit("penstock serve does not answer")
            time.sleep(0.01)
        taken = time.perf_counter() - begin
        time.sleep(IDLE_SECONDS)
        resident = resident_bytes(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_SECONDS)
    return {"seconds": taken, "resident_bytes": resident}


def answers(url: str) -> bool:
    """Whether the service answers that it is ready."""
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def resident_bytes(pid: int) -> int:
    """Resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(name: str, programs: Path) -> dict[str, Any]:
    """Measure the first start, which creates the database, and the median of later ones."""
    with tempfile.TemporaryDirectory(prefix="penstock-start-") as folder:
        first, *more = (start_once(programs / "penstock", Path(folder)) for _ in range(1 + REPEATS))
    return {
        "environment": name,
        "first_seconds": first["seconds"],
        "seconds": statistics.median(start["seconds"] for start in more),
        "resident_bytes": max(start["resident_bytes"] for start in (first, *more)),
        "plans": plans(programs),
    }


def plans(programs: Path) -> bool:
    """Whether the environment can plan."""
    done = subprocess.run(
        [programs / "penstock", "plan", *GPT3, "-o", "json"], cwd=ROOT, capture_output=True, check=False
    )
    return done.returncode == 0 and "schedule" in done.stdout.decode()


def markdown(results: dict[str, Any]) -> str:
    """The table as Markdown."""
    return "\n".join(
        [
            "# Starting the service",
            "",
            f"{results['machine']}, load {results['load_before']:.1f} before. `penstock serve` on SQLite, from its "
            f"start to the first answer: the first start makes the database; then the median of {REPEATS}. Memory is "
            f"the most that was resident {IDLE_SECONDS:.0f} s later, idle.",
            "",
            "| environment | first start s | start s | idle MB | plans |",
            "|---|---:|---:|---:|---|",
            *(
                f"| {row['environment']} | {row['first_seconds']:.2f} | {row['seconds']:.2f} "
                f"| {row['resident_bytes'] / 1e6:.0f} | {'yes' if row['plans'] else 'no'} |"
                for row in results["rows"]
            ),
            "",
            "Targets: 2 s, 150 MB.",
            "",
        ]
    )


def main() -> None:
    """Measure and write both files."""
    load = os.getloadavg()[0]
    rows = [measure("with everything", Path(sys.executable).parent)]
    with tempfile.TemporaryDirectory(prefix="penstock-environment-") as folder:
        rows.append(measure("without torch", environment_without_torch(Path(folder) / "venv")))
    write_results("service_start", json.dumps({"load_before": load, "rows": rows}), markdown)


if __name__ == "__main__":
    main()
