"""Writes reports of pods to the cluster: measurements as ConfigMaps, progress in the status of jobs.

Both are derived from the store and the cluster's objects. So any of several services may receive a pod's report, and
any may be killed at any time: the next holder of the Lease continues.

No decision compares times of two clocks, or times before and after a jump of one. A turn reads the reports of all
unfinished jobs, now and then of all jobs. Those that differ from what was read before are new. Intervals are by this
process's monotonic clock.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from penstock.api.cluster.fence import StoreAccess
from penstock.api.cluster.kube import Cluster
from penstock.api.cluster.mirror import Mirror
from penstock.api.store import profiles, reports
from penstock.api.store.epochs import LostLeaseError
from penstock.api.store.reports import UNFINISHED, AnyRow, Measurement, Report
from penstock.api.store.writer import WriterClosedError
from penstock.core.lifecycle import Phase
from penstock.core.profile import Profile
from penstock.core.status import JobProgress
from penstock.kube.names import API_VERSION, ATTEMPT_LABEL, JOB_KIND, JOB_LABEL, PROFILE_FILE, UID_LABEL, profile_name
from penstock.kube.packing import packed
from penstock.kube.resources import CONFIG_MAPS, JOBS
from penstock.kube.transport import KubeError

log = logging.getLogger(__name__)

PAUSE_SECONDS = 5.0
"""Minimum interval of a job's progress reports, except for urgent ones."""

WHOLE_SECONDS = 10.0
"""Interval of turns that read the reports of all jobs. Other turns miss a finished job that had not reported before its
end, as one that ended between two turns, or whose pod reports late.
"""

LATE_SECONDS = 60.0
"""Seconds after its end for which the reports of a job that had reported before are read in every turn."""

MOST_OTHERS = 500
"""Jobs that are read by uid; if there are more, all are read. Databases limit the number of parameters."""

RETRY_SECONDS = 0.4
"""Minimum interval of a job's urgent reports."""

REMEMBERED_SECONDS = 60.0
"""Seconds for which this service remembers what it wrote. Within them the watch delivers the write."""

NUM_THREADS = 8
NOTHING = JobProgress(attempt=0)


class Reporter:
    """Writes the store's reports to the cluster; `Mirror` has its current state. ``seconds`` is a monotonic clock."""

    def __init__(
        self, store: StoreAccess, kube: Cluster, mirror: Mirror, seconds: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._kube, self._mirror, self._seconds = store, kube, mirror, seconds
        self._rows: dict[str, AnyRow] = {}
        self._whole_at = -math.inf
        self._ended_at: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._last: dict[str, tuple[float, JobProgress]] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="penstock-reports")

    def run_once(self) -> None:
        """Write due reports. Logs errors; the next call retries."""
        try:
            self._publish()
            self._write_due()
        except (SQLAlchemyError, WriterClosedError, LostLeaseError) as error:
            log.warning("progress of jobs could not be written to the cluster: %s; retrying at the next poll", error)

    def close(self) -> None:
        """Finish writes in progress."""
        self._threads.shutdown()

    # Measurements

    def _publish(self) -> None:
        for measurement in self._store.read(lambda connection: reports.unpublished(connection, self._mirror.cluster)):
            if _succeeds(partial(self._create_config_map, measurement), measurement.name):
                marked = partial(
                    reports.mark_published, uid=measurement.uid, attempt=measurement.attempt, ref=_ref(measurement)
                )
                self._store.write(measurement.uid, marked)
                self._waiting.add(measurement.uid)

    def _create_config_map(self, measurement: Measurement) -> None:
        """Create the ConfigMap, unless the same job has it already.

        It exists if a service was killed after its creation, but before the measurement was marked as published.
        """
        _, profile = self._store.read(lambda connection: profiles.get(connection, measurement.digest))
        made = config_map(measurement, profile)
        metadata = made["metadata"]
        try:
            self._kube.create_config_map(made)
        except KubeError as error:
            if not error.is_taken:
                raise
            existing = self._kube.get(CONFIG_MAPS, metadata["namespace"], metadata["name"])["metadata"]
            if existing.get("labels", {}).get(UID_LABEL) != measurement.uid:
                what = f"ConfigMap {metadata['name']} belongs to another owner; delete it"
                raise KubeError(409, "NameTaken", what) from None

    # Progress

    def _write_due(self) -> None:
        now = self._seconds()
        new = self._new_reports(now)
        changed = [report for report in new if _compared(report.progress) != _compared(self._current(report.uid))]
        self._waiting = {report.uid for report in changed}
        ready = [report for report in changed if self._is_due(report, now)]
        written = self._threads.map(lambda report: _succeeds(partial(self._write_one, report), report.name), ready)
        for report, succeeded in zip(ready, written, strict=True):
            self._last[report.uid] = (now, report.progress if succeeded else self._current(report.uid))
        self._last = {uid: last for uid, last in self._last.items() if now - last[0] < REMEMBERED_SECONDS}

    def _new_reports(self, now: float) -> list[Report]:
        """Return reports that differ from those read before, and those that wait for a write."""
        cluster, before, others = self._mirror.cluster, self._rows, self._waiting | self._ended_at.keys()
        is_whole = now - self._whole_at >= WHOLE_SECONDS or len(others) > MOST_OTHERS

        def read(connection: Connection) -> tuple[dict[str, AnyRow], list[Report]]:
            rows = reports.reported_rows(connection, cluster, None if is_whole else others)
            is_new = (uid in self._waiting or row != before.get(uid) for uid, row in rows.items())
            return rows, reports.reports(connection, [*compress(rows.values(), is_new)])

        rows, new = self._store.read(read)
        self._rows = rows if is_whole else before | rows
        self._whole_at = now if is_whole else self._whole_at
        ended = _unfinished(before) - _unfinished(rows)
        late = {uid: at for uid, at in self._ended_at.items() if now - at < LATE_SECONDS}
        self._ended_at = late | dict.fromkeys(ended, now)
        return new

    def _current(self, uid: str) -> JobProgress:
        """Return the progress on the cluster: as last written by this service, or as observed by the watch."""
        if uid in self._last:
            return self._last[uid][1]
        return self._mirror.reported_progress(uid) or NOTHING

    def _is_due(self, report: Report, now: float) -> bool:
        """Whether the minimum interval since the last write has passed.

        The interval is shorter for urgent reports: a new measurement, the first step of an attempt, the end of a job.
        """
        known, new = self._current(report.uid), report.progress
        tried_at, _ = self._last.get(report.uid, (-PAUSE_SECONDS, NOTHING))
        awaited = (new.attempt, new.epoch, new.profile_ref) != (known.attempt, known.epoch, known.profile_ref)
        return now - tried_at >= (RETRY_SECONDS if awaited or report.phase is not Phase.RUNNING else PAUSE_SECONDS)

    def _write_one(self, report: Report) -> None:
        """Write at the last observed version, or after a conflict at the current one if it is still the same job."""
        key, version = (report.namespace, report.name, report.uid), self._mirror.version(report.uid)
        try:
            if version:
                return self._kube.report(key, report.progress, version)
        except KubeError as error:
            if not error.is_conflict:
                raise
        current = self._kube.get(JOBS, report.namespace, report.name)["metadata"]
        if current["uid"] != report.uid:
            raise KubeError(404, "NotFound", "the job was deleted and its name reused")
        return self._kube.report(key, report.progress, current["resourceVersion"])


def _unfinished(rows: Mapping[str, AnyRow]) -> set[str]:
    return {uid for uid, row in rows.items() if row.phase in UNFINISHED}


def _compared(progress: JobProgress) -> dict[str, Any]:
    """Return the fields that are compared to detect a change: all but the speed, which depends only on others.

    A status that an earlier version wrote, or that a cluster with an earlier CRD stores, has no speed.
    """
    return replace(progress, speed=None).to_manifest()


def config_map(measurement: Measurement, profile: Profile) -> dict[str, Any]:
    """Return the ConfigMap with an attempt's profile, for planners; it is deleted with its job."""
    labels = {JOB_LABEL: measurement.name, UID_LABEL: measurement.uid, ATTEMPT_LABEL: str(measurement.attempt)}
    owner = {"apiVersion": API_VERSION, "kind": JOB_KIND, "name": measurement.name, "uid": measurement.uid}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": _ref(measurement),
            "namespace": measurement.namespace,
            "labels": labels,
            "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": False}],
        },
        "binaryData": {PROFILE_FILE: packed(profile.to_manifest())},
    }


def _ref(measurement: Measurement) -> str:
    return profile_name(measurement.name, measurement.attempt)


def _succeeds(call: Callable[[], None], job: str) -> bool:
    """Whether the cluster accepted the call. A missing job is no warning: the watch reports its deletion too."""
    try:
        call()
    except KubeError as error:
        level = logging.DEBUG if error.is_missing else logging.WARNING
        message = "job %s: its report could not be written to the cluster: %s; retrying at the next poll"
        log.log(level, message, job, error)
        return False
    return True
