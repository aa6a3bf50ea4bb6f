"""A service that lost the Lease writes nothing more, wherever it was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select

from penstock.api.cluster.fence import Fence
from penstock.api.service import Service
from penstock.api.store.epochs import LostLeaseError
from penstock.api.store.schema import epochs
from tests.support import postgres
from tests.support.service import new_service


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


def test_what_needs_no_lease_is_written_without_one(service: Service) -> None:
    one, two = Fence(service), Fence(service)
    one.begin()
    assert two.write("key", lambda connection: 2) == 2
    one.end()
    two.begin()
    assert one.write("key", lambda connection: 1) == 1


STOPPED = """
import signal, sys, threading
from pathlib import Path
from sqlalchemy import insert
from penstock.api.cluster.fence import Fence
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
    """Whoever takes the Lease waits for the end of that transaction, and not for the service to go on."""
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
