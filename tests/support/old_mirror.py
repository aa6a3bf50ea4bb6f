"""The database of a service on a cluster, as the code of commit 16853cd kept it, and the cluster that it followed.

``tests/fixtures/mirror_16853cd`` was made from a work tree of that commit, with this file and ``old_service.py`` copied
into it:

    python -m tests.support.old_mirror tests/fixtures/mirror_16853cd

For each kind of database there are the tables, and as JSON the cluster's PipelineJobs and ConfigMaps.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg

from penstock.core.records import Record, RecordKind
from penstock.kube.packing import packed
from tests.support import postgres
from tests.support.fake_apiserver import FakeApiserver
from tests.support.old_service import KINDS, postgresql_dump, sqlite_dump
from tests.support.on_cluster import OnCluster, instant, on_cluster
from tests.support.sample_run import sample_plan, sample_profile
from tests.support.service import NOW, Clock, job_manifest, step_records

FOLDER = Path(__file__).parents[1] / "fixtures" / "mirror_16853cd"
STEPS = 12


def restored(kind: str, folder: Path, database: str, fake: FakeApiserver) -> None:
    """Put the tables into ``database``, or SQLite's file in ``folder``, and the objects on the cluster."""
    statements = (FOLDER / f"{kind}.sql").read_text()
    if kind == "sqlite":
        with contextlib.closing(sqlite3.connect(folder / "penstock.db")) as connection:
            connection.executescript(statements)
    else:
        with psycopg.connect(database, autocommit=True) as session:
            session.execute(statements.encode())
    for plural, found in json.loads((FOLDER / f"{kind}.json").read_text()):
        version = int(found["metadata"]["resourceVersion"])
        fake.add(plural, found)
        while int(found["metadata"]["resourceVersion"]) < version:  # versions go on where that cluster was
            fake.touch(found)


def token_of(name: str) -> str:
    """Of the pod of that job's attempt."""
    return f"a.{name}.token"


def _status(name: str, attempt: int, **more: Any) -> Mapping[str, Any]:
    return {"phase": name, "reason": "", "attempt": attempt, "phaseEnteredAt": instant(NOW), **more}


def _live_through(here: OnCluster) -> None:
    fake, plan = here.fake, sample_plan()
    jobs = {name: fake.add_job(job_manifest(name), **_status("Profiling", 1)) for name in ("live", "ended", "lost")}
    fake.add_job(job_manifest("waiting"), **_status("Queued", 0))
    here.mirror()
    for name, job in jobs.items():
        uid, token = job["metadata"]["uid"], token_of(name)
        fake.add_rank(job, 1, token)
        about = {"uid": uid, "attempt": 1, "recorded_at": NOW, "kind": RecordKind.PROFILE}
        measured = Record(source="pod-0", sequence=0, profile=sample_profile(), **about)
        assert here.send(token, [measured]).status_code == 200
        here.turn()
        metadata = {"name": f"{name}-a1", "namespace": "default"}
        fake.add("configmaps", {"metadata": metadata, "binaryData": {"plan.json.gz": packed(plan.to_manifest())}})
        fake.touch(job, **_status("Running", 1, plan={"digest": plan.digest, "summary": "pp 2"}))
        here.mirror()
        assert here.send(token, step_records(uid, range(STEPS))).status_code == 200
        here.turn()
    fake.touch(jobs["ended"], **_status("Succeeded", 1, finishedAt=instant(NOW)))
    fake.touch(jobs["lost"], **_status("Recovering", 1, failures=1))
    here.mirror()


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        fake = FakeApiserver()
        with contextlib.ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = ""
            if kind == "postgresql":
                url = stack.enter_context(postgres.database(stack.enter_context(postgres.server())))
            with on_cluster(root, url, fake, Clock()) as here:
                _live_through(here)
            dump = postgresql_dump(url) if url else sqlite_dump(root / "penstock.db")
            (folder / f"{kind}.sql").write_text(dump)
        kept = [
            [key[0], found] for key, found in sorted(fake.objects.items()) if key[0] in ("pipelinejobs", "configmaps")
        ]
        (folder / f"{kind}.json").write_text("[\n" + ",\n".join(map(json.dumps, kept)) + "\n]\n")


if __name__ == "__main__":
    _make(Path(sys.argv[1]))
