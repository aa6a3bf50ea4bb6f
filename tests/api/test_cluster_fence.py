"""A service that lost the Lease writes nothing more, wherever it was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select

from penstock.api.cluster.fence import Fence
from penstock.api.cluster.membership import following
from penstock.api.cluster.mirror import MirrorError
from penstock.api.service import Service
from penstock.api.store.epochs import LostLeaseError
from penstock.api.store.schema import epochs
from tests.support import postgres
from tests.support.fake_apiserver import FakeApiserver
from tests.support.on_cluster import OnCluster, on_cluster
from tests.support.service import Clock, job_manifest, new_service


def test_a_new_epoch_ends_the_one_before(service: Service) -> None:
    one, two = Fence(service), Fence(service)
    one.begin()
    assert one.write("key", lambda connection: 1) == 1
    two.begin()
    with pytest.raises(LostLeaseError, match="epoch 1 of the Lease has ended; the newest is 2"):
        one.write("key", lambda connection: 1)
    assert (one.valid, two.valid) == (False, True)
    assert two.write("key", lambda connection: 2) == 2
    one.begin()
    assert one.valid
    assert one.write("key", lambda connection: 3) == 3


@pytest.fixture
def here(tmp_path: Path, database: str, clock: Clock) -> Iterator[OnCluster]:
    """A service whose watches end with the block."""
    fake = FakeApiserver()
    fake.add_job(job_manifest())
    with on_cluster(tmp_path, database, fake, clock) as made:
        yield made


def test_a_former_holder_is_refused_what_its_watcher_writes_late(here: OnCluster) -> None:
    """A watcher may be at work still when the Lease is gone and another service has taken it."""
    part = following(here.service, here.member)
    part.run_once()
    part.close()
    Fence(here.service).begin()
    here.fake.touch(here.fake.job("tiny"), phase="Queued")  # news, or there may be nothing left to write
    with pytest.raises(MirrorError, match="epoch 1 of the Lease has ended; the newest is 2"):
        here.mirror()


def test_what_a_request_looked_up_is_kept_by_a_former_holder(here: OnCluster) -> None:
    """Any service answers requests; the version of a job at the cluster decides there."""
    here.member.fence.begin()
    Fence(here.service).begin()
    stored = here.member.mirror.refresh("default", "tiny")
    assert stored is not None
    assert stored.name == "tiny"


STOPPED = """
import signal, sys, threading
from pathlib import Path
from sqlalchemy import insert
from penstock.api.cluster.fence import Fence
from penstock.api.cluster.membership import following
from penstock.api.cluster.mirror import MirrorError
from penstock.api.store import engine
from penstock.api.store.epochs import LostLeaseError
from penstock.api.store.schema import epochs
from tests.support.service import new_service

engine.IDLE_SECONDS = 1.0
service = new_service(Path(sys.argv[1]), sys.argv[2])
fence = Fence(service)
fence.begin()

def change(connection):
    connection.execute(insert(epochs).values(name="mirrored", epoch=1))
    print("inside", flush=True)
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # sent to the process, this thread might still commit

for what in (change, lambda connection: None):
    try:
        fence.write("job", what)
        print("written", flush=True)
    except LostLeaseError:
        print("lost", flush=True)
    except Exception:
        print("ended", flush=True)
service.close()
"""


def test_a_service_that_is_stopped_inside_a_transaction_cannot_commit_it(
    tmp_path: Path, postgres_url: str, postgres_tables: str
) -> None:
    """The next holder of the Lease waits for the end of that transaction, and not for the service to go on."""
    with postgres.database(postgres_url, like=postgres_tables) as url:
        (tmp_path / "stopped").mkdir()
        stopped = subprocess.Popen(
            [sys.executable, "-c", STOPPED, str(tmp_path / "stopped"), url], stdout=subprocess.PIPE, text=True
        )
        try:
            assert stopped.stdout is not None
            assert stopped.stdout.readline() == "inside\n"
            _, status = os.waitpid(stopped.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            with closing(new_service(tmp_path, url)) as service:
                fence = Fence(service)
                fence.begin()
                assert fence.write("job", lambda connection: "mine") == "mine"
                os.kill(stopped.pid, signal.SIGCONT)
                said, _ = stopped.communicate(timeout=60)
                assert said.split() == ["ended", "lost"]
                names = service.read(lambda c: c.execute(select(epochs.c.name)).scalars().all())
                assert list(names) == ["service"], "nothing of the stopped transaction stayed"
                assert fence.valid
        finally:
            stopped.kill()
            stopped.wait()
