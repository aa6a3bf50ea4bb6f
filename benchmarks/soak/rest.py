"""Fuzz the REST API and the pages of a real service process under a memory limit.

The service is the complete `penstock serve`, but this process holds the machine's lock. So jobs of the fuzzer that the
service accepts are queued and do not run. Plans for `/v1/plans` run in the usual processes.
"""

from __future__ import annotations

import random
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.soak.kills import TRACEBACK
from benchmarks.soak.requests import Known, Operation, operations, request, send, squeezed
from sqlalchemy import update

from penstock.api.store.engine import make_engine, parse_url
from penstock.api.store.schema import jobs
from penstock.core.host.locks import Lock, machine_lock_path
from penstock.core.lifecycle import Phase
from tests.support.polling import milliseconds
from tests.support.service import step_records
from tests.support.serving import Served, served, served_job

ADDRESS_SPACE_BYTES = 3 * 2**30
"""Hard limit of the service process. Threads and allocators reserve far more than they use."""
RESIDENT_BYTES = 512 * 2**20
"""Limit of the service's peak memory."""
CASE_SECONDS = 30.0
SLOW_DOWN_SECONDS = 0.2
ROLES = ("admin", "admin", "admin", "editor", "viewer", "ingest")


@contextmanager
def fuzzed_service(folder: Path) -> Iterator[Served]:
    """A service under the memory limit that launches nothing."""
    path = machine_lock_path({"XDG_STATE_HOME": str(folder / "state")}, Path.home(), socket.gethostname())
    path.parent.mkdir(parents=True)
    with closing(Lock(path, "the fuzzer")) as lock:
        assert lock.take()
        with served(folder, log=folder / "service.log") as service:
            assert service.process is not None
            resource.prlimit(service.process.pid, resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
            yield service


def known_of(service: Served) -> Known:
    """Create two jobs with some history, tokens of every role, and other objects that requests may name."""
    client = service.client
    uids = [service.submit(name) for name in ("tiny", "other")]
    made = [
        client.post("/v1/tokens", json={"name": f"fuzz-{number}", "role": role, "namespace": None}).json()
        for number, role in enumerate(ROLES)
    ]
    spare = client.post("/v1/tokens", json={"name": "spare", "role": "viewer", "namespace": None}).json()
    plan = client.post("/v1/plans", json={"job": served_job("tiny"), "cluster": None})
    records = [record.to_manifest() for record in step_records(uids[0], range(5))]
    values = {
        "namespace": ("default", "default", "team"),
        "name": ("tiny", "tiny", "other"),
        "uid": uids,
        "request": [plan.json().get("id", "none")],
        "token": [spare.get("id", "none")],
        "session": ["none"],
        "digest": ["0" * 64],
        "attempt": ["1"],
        "step": ["0", "40"],
        "path": ["metrics.jsonl", "logs/rank-0.log", "app.css"],
        "job": ("tiny", "default/tiny"),
        "phase": ("Queued",),
        "label": ("a=b",),
        "sort": ("-created", "name"),
        "limit": ("10",),
        "deleted": ("true",),
        "dryRun": ("true",),
    }
    _run_elsewhere(service, uids[0])
    first = client.post("/v1/ingest", content=squeezed(records), headers=_ingesting(made[-1]["token"]))
    assert first.status_code == 200, first.text
    tokens = [token["token"] for token in made]
    return Known(values=values, tokens=tokens, records=records, host=f"127.0.0.1:{service.port}")


def _ingesting(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "Content-Encoding": "gzip", "Content-Type": "application/json"}


def _run_elsewhere(service: Served, uid: str) -> None:
    """Assign the job to another executor, so that the service accepts records for it."""
    engine = make_engine(parse_url(f"sqlite:///{service.folder / 'data' / 'penstock.db'}"))
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        running = update(jobs).where(jobs.c.uid == uid)
        connection.execute(running.values(attempt=1, phase=Phase.RUNNING.value, executor="another"))
    engine.dispose()


class RestFuzz:
    """Sends requests from a seed to a service, and keeps violations."""

    def __init__(self, service: Served, seed: int, keep: Callable[[str, bytes], Path]) -> None:
        self._service, self._seed, self._keep = service, seed, keep
        self._operations, self._known = operations(), known_of(service)
        self._with_body = [operation for operation in self._operations if operation.has_body]
        self.statuses: Counter[int] = Counter()
        self.seconds: list[float] = []
        self.violations: list[str] = []
        self.number = 0

    def once(self) -> None:
        """Send the next request."""
        number, self.number = self.number, self.number + 1
        several = self._with_body if number % 2 else self._operations
        operation = several[number // 2 % len(several)]
        chance = random.Random(f"{self._seed} rest {number}")
        raw = request(chance, operation, self._known)
        try:
            answer = send(self._service.port, raw, CASE_SECONDS)
        except (OSError, ValueError) as error:
            self._violated(operation, raw, f"got no answer: {error!r}")
            return
        self.statuses[answer.status] += 1
        self.seconds.append(answer.seconds)
        if answer.status >= 500:
            self._violated(operation, raw, f"was answered {answer.status}: {answer.text[-300:]!r}")
        elif answer.status == 0 and answer.text:
            self._violated(operation, raw, f"was answered by what is no HTTP: {answer.text[:80]!r}")
        elif answer.seconds > CASE_SECONDS:
            self._violated(operation, raw, f"took {answer.seconds:.1f} s")
        if answer.status == 429:
            time.sleep(SLOW_DOWN_SECONDS)

    def alive(self) -> bool:
        """Whether the service still runs. Records a violation if not."""
        process = self._service.process
        assert process is not None
        if process.poll() is None:
            return True
        self.violations.append(f"the service ended with exit code {process.returncode} after {self.number} requests")
        return False

    def close(self) -> dict[str, Any]:
        """Check the service's memory and log. Returns the figures."""
        assert self._service.log is not None
        peak = peak_bytes(self._service.process.pid) if self._service.process else 0
        if peak > RESIDENT_BYTES:
            self.violations.append(f"the service used {peak / 1e6:.0f} MB, more than {RESIDENT_BYTES / 1e6:.0f} MB")
        log = self._service.log.read_text(errors="replace")
        if TRACEBACK in log:
            place = log.index(TRACEBACK)
            first = log[max(place - 300, 0) : place + 3000]
            self.violations.append(f"the service printed {log.count(TRACEBACK)} tracebacks, the first: {first}")
        return {
            "cases": self.number,
            "operations": len(self._operations),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "milliseconds": milliseconds(self.seconds),
            "peakBytes": peak,
            "limitBytes": RESIDENT_BYTES,
            "violations": self.violations,
        }

    def _violated(self, operation: Operation, raw: bytes, what: str) -> None:
        path = self._keep(f"rest-{self._seed}-{self.number - 1}", raw)
        self.violations.append(f"{operation.method} {operation.path} {what} (the request is in {path})")


def peak_bytes(pid: int) -> int:
    """Peak resident bytes of a process; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
