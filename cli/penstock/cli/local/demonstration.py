"""Demonstration of a job and its own service, from an empty folder to the summary: `penstock demo`.

All files are in one folder, the user's configuration is not changed, and no process is left after the end.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from penstock.agent.local_launch import local_launches
from penstock.cli import output
from penstock.cli.local.reporting import write_report
from penstock.cli.remote import follow_job
from penstock.cli.summary import Summary, summarise
from penstock.client import Client, Job, Place, Status, Target, target
from penstock.client.config import CA, SERVER, TOKEN
from penstock.core.errors import PenstockError, UserError
from penstock.core.host.locks import STATE, machine_lock_path
from penstock.core.host.ports import LOOPBACK, free_port
from penstock.core.host.stopping import StopRequestedError, listening
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import MISTAKES, Phase
from penstock.core.run.attempt_folder import shipping_lock
from penstock.core.run.claims import is_locked
from penstock.core.run.folder import RunDir

PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.1
LAST_WORDS = 20


class NoServiceError(PenstockError):
    """The service did not start."""


def demonstrate(job: PipelineJob, folder: Path, data: Sequence[str] = ()) -> Summary:
    """Serve from ``folder``, submit the job there, watch it until it has ended, and end the service.

    ``data`` are the folders, NAME=FOLDER, that the job may read.

    Raises:
        UserError: the job failed by a mistake that the user can fix.
        NoServiceError: the service did not start.
        StopRequestedError: a stop was requested; the job has ended then, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with listening() as requests, _service(folder, data) as place, Client(place) as client:
        made = client.submit(job)
        output.say(f"open in a browser, within a minute: {client.login_link().url}")
        name = Place(name=made.name, namespace=made.namespace)
        try:
            with requests.cutting():
                status = follow_job(client, name).status
        except StopRequestedError:
            output.say("stopping")
            _end(client, name)
            raise
        finally:
            _wait_until(lambda: not any(map(is_locked, map(shipping_lock, folder.glob("runs/*")))))
        if status.phase is Phase.FAILED:
            _report_failure(status)
        command = f"penstock serve --folder {folder} --port {urlsplit(place.server).port}"
        output.say(f"to open its pages later: {command}, and then: XDG_CONFIG_HOME={folder / 'config'} penstock ui")
        return _summed_up(folder, client.get(name))


def _report_failure(status: Status) -> None:
    """Report the cause of the failure, or raise it if it is the user's mistake."""
    if status.reason in MISTAKES:
        raise UserError.reported(status.message)
    output.say_failure(status.message)


def _summed_up(folder: Path, job: Job) -> Summary:
    run = RunDir(folder / "runs" / job.uid)
    if job.status.phase is Phase.SUCCEEDED:
        write_report(run, job.status.phase)
    return summarise(run, job.status.phase.value, job.status.attempt)


@contextmanager
def _service(folder: Path, data: Sequence[str]) -> Iterator[Target]:
    """`penstock serve` until the block ends. It has a session of its own, so that Ctrl-C does not reach it."""
    port, environment = free_port(), _environment(folder)
    command = [sys.executable, "-m", "penstock.cli", "serve", "--folder", str(folder), "--port", str(port)]
    command += [part for folder_spec in data for part in ("--data", folder_spec)]
    log = folder / "service.log"
    with log.open("w") as lines:
        service = subprocess.Popen(command, env=environment, stdout=lines, stderr=lines, start_new_session=True)
    try:
        _wait(service, f"http://{LOOPBACK}:{port}/readyz", log)
        yield target(None, environment, Path.home())
    finally:
        service.terminate()
        service.wait()


def _environment(folder: Path) -> dict[str, str]:
    """The environment of this service alone: the user's configuration may name another service."""
    environment = {name: value for name, value in os.environ.items() if name not in (SERVER, TOKEN, CA)}
    environment["XDG_CONFIG_HOME"] = str(folder / "config")
    if is_locked(machine_lock_path(environment, Path.home(), socket.gethostname())):
        output.say("another service launches jobs on this machine; the demonstration does not wait for their resources")
        environment[STATE] = str(folder / "state")
    elif holdings := local_launches().holdings():
        output.say(f"{holdings[0]}; the demonstration does not wait for it")
        environment[STATE] = str(folder / "state")
    return environment


def _wait(service: subprocess.Popen[bytes], url: str, log: Path) -> None:
    if not _wait_until(lambda: service.poll() is not None or _answers(url)) or service.poll() is not None:
        lines = "\n".join(log.read_text().splitlines()[-LAST_WORDS:])
        raise NoServiceError(f"the service did not start; the last lines of {log}:\n{lines}")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _end(client: Client, place: Place) -> None:
    """Delete the job, and wait until nothing of it runs."""
    client.delete(place)
    if not _wait_until(lambda: all(job.name != place.name for job in client.jobs(namespace=place.namespace))):
        output.say("the job has not ended yet; it also ends without the service")


def _wait_until(holds: Callable[[], bool]) -> bool:
    """Wait until ``holds`` returns true; return whether it did within `PATIENCE_SECONDS`."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True
