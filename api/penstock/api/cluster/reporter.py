"""Writes reports of pods to the cluster: measurements as ConfigMaps, progress in the status of jobs.

Both follow from the store and from the cluster's objects. So any service may receive a report, and be killed at any
time: the next one that mirrors continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from penstock.api.cluster.keeper import Keeper
from penstock.api.cluster.kube import Cluster
from penstock.api.cluster.mirror import Mirror
from penstock.api.store import measurements, profiles
from penstock.api.store.epochs import LostLeaseError
from penstock.api.store.measurements import Measurement
from penstock.api.store.reports import Report, reports
from penstock.api.store.writer import WriterClosedError
from penstock.core.profile import Profile
from penstock.core.status import JobProgress
from penstock.kube.names import API_VERSION, ATTEMPT_LABEL, JOB_KIND, JOB_LABEL, PROFILE_FILE, UID_LABEL, profile_name
from penstock.kube.packing import packed
from penstock.kube.resources import CONFIG_MAPS, JOBS
from penstock.kube.transport import KubeError

log = logging.getLogger(__name__)

PAUSE_SECONDS = 5.0
"""Minimum interval of a job's progress reports, except for urgent ones."""

SLACK_SECONDS = 10.0
"""Overlap of successive searches for new reports: their time is taken before their commit."""

RETRY_SECONDS = 0.4
"""Minimum interval also of urgent reports."""

REMEMBERED_SECONDS = 60.0
"""Seconds within which the watch delivers an earlier write."""

NUM_THREADS = 8
NOTHING = JobProgress(attempt=0)


class Reporter:
    """Writes the store's reports to the cluster; `Mirror` has the cluster's current state."""

    def __init__(self, keeper: Keeper, kube: Cluster, mirror: Mirror) -> None:
        self._keeper, self._kube, self._mirror = keeper, kube, mirror
        self._since = 0.0
        self._waiting: set[str] = set()
        self._last: dict[str, tuple[float, JobProgress]] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="penstock-reports")

    def run_once(self) -> None:
        """Write due reports. Errors are logged, and retried."""
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
        for measurement in self._keeper.read(
            lambda connection: measurements.unpublished(connection, self._mirror.cluster)
        ):
            if _succeeds(partial(self._create_config_map, measurement), measurement.name):
                marked = partial(
                    measurements.mark_published, uid=measurement.uid, attempt=measurement.attempt, ref=_ref(measurement)
                )
                self._keeper.write(measurement.uid, marked)
                self._waiting.add(measurement.uid)

    def _create_config_map(self, measurement: Measurement) -> None:
        """Create the ConfigMap. An existing one of the same attempt is fine: only its mark in the store was lost."""
        _, profile = self._keeper.read(lambda connection: profiles.get(connection, measurement.digest))
        made = config_map(measurement, profile)
        metadata = made["metadata"]
        try:
            self._kube.lay(made)
        except KubeError as error:
            if not error.is_taken:
                raise
            existing = self._kube.get(CONFIG_MAPS, metadata["namespace"], metadata["name"])["metadata"]
            if existing.get("labels", {}).get(UID_LABEL) != measurement.uid:
                what = f"ConfigMap {metadata['name']} belongs to another owner; delete it"
                raise KubeError(409, "NameTaken", what) from None

    # Progress

    def _write_due(self) -> None:
        now, waiting = self._keeper.clock(), frozenset(self._waiting)
        cluster, since = self._mirror.cluster, self._since
        reported = self._keeper.read(lambda connection: reports(connection, cluster, since, waiting))
        self._since = now - SLACK_SECONDS
        changed = [report for report in reported if _compared(report.progress) != _compared(self._current(report.uid))]
        ready = [report for report in changed if self._is_due(report, now)]
        for report, succeeded in zip(ready, self._threads.map(self._report, ready), strict=True):
            self._last[report.uid] = (now, report.progress if succeeded else self._current(report.uid))
        self._waiting = {report.uid for report in changed}
        self._last = {uid: last for uid, last in self._last.items() if now - last[0] < REMEMBERED_SECONDS}

    def _current(self, uid: str) -> JobProgress:
        """Return the progress on the cluster: as last written by this service, or as observed by the watch."""
        if uid in self._last:
            return self._last[uid][1]
        return self._mirror.reported_progress(uid) or NOTHING

    def _is_due(self, report: Report, now: float) -> bool:
        """Whether the interval has passed, or the report is urgent: a measurement to plan by, a first or last step."""
        known, new = self._current(report.uid), report.progress
        tried_at, _ = self._last.get(report.uid, (-PAUSE_SECONDS, NOTHING))
        awaited = (new.attempt, new.epoch, new.profile_ref) != (known.attempt, known.epoch, known.profile_ref)
        return now - tried_at >= (RETRY_SECONDS if awaited or not report.running else PAUSE_SECONDS)

    def _report(self, report: Report) -> bool:
        return _succeeds(lambda: self._write_one(report), report.name)

    def _write_one(self, report: Report) -> None:
        """Write at the last observed version, or after a conflict at the current one if it is still the same job."""
        place, seen = (report.namespace, report.name, report.uid), self._mirror.version(report.uid)
        try:
            if seen:
                return self._kube.report(place, report.progress, seen)
        except KubeError as error:
            if not error.is_conflict:
                raise
        current = self._kube.get(JOBS, report.namespace, report.name)["metadata"]
        if current["uid"] != report.uid:
            raise KubeError(404, "NotFound", "the job was deleted and its name reused")
        return self._kube.report(place, report.progress, current["resourceVersion"])


def _compared(progress: JobProgress) -> dict[str, Any]:
    """The fields that are compared for changes. The speed follows from the others, and is written with them.

    An earlier version wrote none, and a cluster with an earlier CRD keeps none.
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
    """Whether the cluster accepted the call. The deletion of a job is also reported by the watch."""
    try:
        call()
    except KubeError as error:
        level = logging.DEBUG if error.is_missing else logging.WARNING
        message = "job %s: its report could not be written to the cluster: %s; retrying at the next poll"
        log.log(level, message, job, error)
        return False
    return True
