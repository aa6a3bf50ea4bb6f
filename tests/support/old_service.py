"""Services of commit 16853cd, the code of version 0.1.0: databases and run folders as their processes left them.

``tests/fixtures/service_16853cd`` was made from a work tree of that commit, with this file and ``old_files.py`` copied
into it, on a machine with two cores, as root:

    unshare --uts sh -c 'hostname node-1; exec python -m tests.support.old_service tests/fixtures/service_16853cd'

For each kind of database a service of that commit ran six jobs, in processes of its own, and was killed with SIGKILL.
Two attempts went on: ``ending`` came to its end, which no service heard of, and ``live`` was killed later. There are
``database.sql``, ``expected.json`` (what the API said before the kill, and the steps that ranks wrote), and ``folder``,
the files, in which @FOLDER@ stands for that folder. Other paths are replaced by some of the same length, because places
in logs were noted. Of caches, checkpoints and profiles only those of ``paused`` are kept, and with PostgreSQL only the
files of the two attempts that were alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import inspect, text

from penstock.api.store.engine import make_engine, parse_url
from penstock.core.run.folder import RunDir
from tests.support import old_files, postgres
from tests.support.command import rank_status
from tests.support.old_files import PLACE, neutral
from tests.support.serving import processes_of, served, wait_until

FOLDER = Path(__file__).parents[1] / "fixtures" / "service_16853cd"
KINDS = ("sqlite", "postgresql")
LIVE = ("ending", "live")
MADE_AT = "madeAt"
_MADE_IN = Path("/tmp/release-0.1.0/service")


def spec(steps: int, ranks: int = 1, **more: Any) -> dict[str, Any]:
    """A job whose checkpoints are small and whose steps take some tens of milliseconds."""
    return {
        "model": {"family": "llama", "layers": 1, "hidden": 4, "heads": 1, "kvHeads": 1},
        "training": {"globalBatch": 64, "steps": steps, "optimizer": {"learningRate": 1e-2}},
        "resources": {"ranks": ranks, "memoryPerRank": "1Gi"},
        "checkpoint": {"everySteps": 4, "keep": 1},
        **more,
    }


# Using


def restored(kind: str, folder: Path, database: str = "") -> dict[str, Any]:
    """Put the files into ``folder`` and the tables into ``database``, or SQLite's file; what is expected of the jobs.

    Times in the database are moved, as if the service had been killed now: retention drops nothing.
    """
    source = FOLDER / kind
    old_files.put(source / "folder", folder)
    statements = (source / "database.sql").read_text().replace(PLACE, str(folder))
    expected: dict[str, Any] = json.loads((source / "expected.json").read_text())
    if kind == "sqlite":
        with contextlib.closing(sqlite3.connect(folder / "data" / "penstock.db")) as connection:
            connection.executescript(statements)
    else:
        with psycopg.connect(database, autocommit=True) as session:
            session.execute(statements.encode())
    _move_times(database or f"sqlite:///{folder / 'data' / 'penstock.db'}", time.time() - expected.pop(MADE_AT))
    return expected


def _move_times(database: str, seconds: float) -> None:
    engine = make_engine(parse_url(database))
    tables = inspect(engine)
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        for table in tables.get_table_names():
            names = [column["name"] for column in tables.get_columns(table)]
            for name in names:
                if name == "at" or name.endswith("_at"):
                    connection.execute(text(f"UPDATE {table} SET {name} = {name} + :seconds"), {"seconds": seconds})
    engine.dispose()


# Making


def _make(target: Path, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        folder = _MADE_IN
        folder.mkdir(parents=True)
        stack.callback(shutil.rmtree, folder.parent)
        options: tuple[str, ...] = ()
        if kind == "postgresql":
            url = stack.enter_context(postgres.database(stack.enter_context(postgres.server())))
            options = ("--database", url)
        service = stack.enter_context(served(folder, *options))
        expected = _live_through(service)
        service.end(signal.SIGKILL)
        wait_until(lambda: _report(folder, expected["ending"]["uid"])["state"] == "succeeded")
        for pid in processes_of(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not processes_of(folder))
        for name, job in expected.items():
            job["steps"] = _steps(folder, job["uid"])
            _drop(folder / "data" / "runs" / job["uid"], name, kind)
        dump = sqlite_dump(folder / "data" / "penstock.db") if kind == "sqlite" else postgresql_dump(url)
        _keep(folder, target, {**expected, MADE_AT: time.time()}, dump)


def _live_through(service: Any) -> dict[str, Any]:
    """Have the service run the jobs; what it says of them, by their names."""
    service.submit("ended", **spec(12))
    service.wait_for("ended", "Succeeded")
    uid = service.submit("failed", **spec(100_000, runPolicy={"backoffLimit": 0}))
    service.wait_for_step("failed", 6)
    _kill_rank(service.run_dir(uid))
    wait_until(lambda: service.status("failed")["phase"] == "Failed")
    service.submit("paused", **spec(100_000))
    service.wait_for_step("paused", 6)
    assert service.client.post("/v1/jobs/default/paused/suspend").status_code == 200
    service.wait_for("paused", "Suspended")
    service.submit("live", **spec(100_000))
    service.submit("ending", **spec(24))
    service.wait_for_step("live", 5)
    service.wait_for_step("ending", 5)
    service.submit("waiting", **spec(12, ranks=2))
    service.wait_for("waiting", "Queued")
    token = service.client.post("/v1/tokens", json={"name": "reader", "role": "viewer"}).json()
    names = ("ended", "failed", "paused", "live", "ending", "waiting")
    return {name: {**_told(service, name), "token": token["token"]} for name in names}


def _told(service: Any, name: str) -> dict[str, Any]:
    """What the API says of the job."""
    get = service.client.get
    job = get(f"/v1/jobs/default/{name}").json()
    events = get(f"/v1/jobs/default/{name}/events", params={"limit": 1000}).json()["items"]
    logs = get(f"/v1/jobs/default/{name}/logs", params={"limit": 1000}).json()["items"]
    return {
        "uid": job["metadata"]["uid"],
        "phase": job["status"]["phase"],
        "events": [each["kind"] for each in events],
        "logs": [each["message"] for each in logs],
    }


def _steps(folder: Path, uid: str) -> list[list[Any]]:
    """Attempt, step and loss of every line that ranks wrote."""
    path = folder / "data" / "runs" / uid / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [[line["attempt"], line["step"], line["loss"]] for line in lines]


def _report(folder: Path, uid: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"data/runs/{uid}/attempts/1/report.json").read_text())
    return found


def _kill_rank(root: Path) -> None:
    os.kill(rank_status(RunDir(root), 0).pid, signal.SIGKILL)


def _drop(root: Path, name: str, kind: str) -> None:
    if name != "paused":
        shutil.rmtree(root / "checkpoints", ignore_errors=True)
        (root / "profile.json").unlink(missing_ok=True)
    if kind == "postgresql" and name not in LIVE:
        shutil.rmtree(root, ignore_errors=True)


def sqlite_dump(path: Path) -> str:
    """The database in SQL."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return "\n".join(connection.iterdump()) + "\n"


def postgresql_dump(url: str) -> str:
    """The database in SQL that psycopg takes as well as psql."""
    options = ["--inserts", "--no-owner", "--no-privileges", "--rows-per-insert=100"]
    made = subprocess.run(["pg_dump", *options, url], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return "".join(f"{line}\n" for line in made.stdout.split("\n") if line and not line.startswith(("\\", "--")))


def _keep(folder: Path, target: Path, expected: dict[str, Any], dump: str) -> None:
    """Copy what is kept, with nothing of this machine in it."""
    shutil.rmtree(target, ignore_errors=True)
    old_files.keep(folder, target / "folder", "cache", "state", "text", "penstock.db*", ".lock", "*-progress.json")
    (target / "database.sql").write_text(neutral(dump, folder))
    (target / "expected.json").write_text(neutral(json.dumps(expected, indent=1) + "\n", folder))


if __name__ == "__main__":
    for each in KINDS:
        _make(Path(sys.argv[1]).absolute() / each, each)
