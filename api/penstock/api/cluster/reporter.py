"""What pods reported, told to the cluster: measurements as ConfigMaps, progress in the status of their jobs.

Both follow from the store and from what the cluster has already. So it does not matter which service took a report, nor
when one was killed: whoever mirrors next goes on where the other was.
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
"""A job's progress is told at most so often, but for what somebody waits for."""

SLACK_SECONDS = 10.0
"""Reports are looked for so far back: their time was taken before they were kept."""

RETRY_SECONDS = 0.4
"""What somebody waits for is not told again sooner either."""

REMEMBERED_SECONDS = 60.0
"""By then the watch has told what the cluster was told."""

NUM_THREADS = 8
NOTHING = JobProgress(attempt=0)


class Reporter:
    """Tells the cluster what the store has of its jobs; `Mirror` knows what it was told."""

    def __init__(self, keeper: Keeper, kube: Cluster, mirror: Mirror) -> None:
        self._keeper, self._kube, self._mirror = keeper, kube, mirror
        self._since = 0.0
        self._waiting: set[str] = set()
        self._last: dict[str, tuple[float, JobProgress]] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="penstock-reports")

    def turn(self) -> None:
        """Tell what is due. What fails is told, and tried again."""
        try:
            self._publish()
            self._tell()
        except (SQLAlchemyError, WriterClosedError, LostLeaseError) as error:
            log.warning("the cluster is told nothing for a while: %s", error)

    def close(self) -> None:
        """Finish what is under way."""
        self._threads.shutdown()

    # Measurements

    def _publish(self) -> None:
        for each in self._keeper.read(lambda connection: measurements.unpublished(connection, self._mirror.cluster)):
            if _succeeds(partial(self._lay, each), each.name):
                marked = partial(measurements.mark_published, uid=each.uid, attempt=each.attempt, ref=_ref(each))
                self._keeper.write(each.uid, marked)
                self._waiting.add(each.uid)

    def _lay(self, measurement: Measurement) -> None:
        """Make the ConfigMap. One that is there already and is the same attempt's is as good: the mark was lost."""
        _, profile = self._keeper.read(lambda connection: profiles.get(connection, measurement.digest))
        made = config_map(measurement, profile)
        metadata = made["metadata"]
        try:
            self._kube.lay(made)
        except KubeError as error:
            if not error.is_taken:
                raise
            found = self._kube.get(CONFIG_MAPS, metadata["namespace"], metadata["name"])["metadata"]
            if found.get("labels", {}).get(UID_LABEL) != measurement.uid:
                what = f"ConfigMap {metadata['name']} belongs to something else; remove it"
                raise KubeError(409, "NameTaken", what) from None

    # Progress

    def _tell(self) -> None:
        now, waiting = self._keeper.clock(), frozenset(self._waiting)
        cluster, since = self._mirror.cluster, self._since
        found = self._keeper.read(lambda connection: reports(connection, cluster, since, waiting))
        self._since = now - SLACK_SECONDS
        news = [each for each in found if _compared(each.progress) != _compared(self._known(each.uid))]
        ready = [each for each in news if self._is_due(each, now)]
        for each, succeeded in zip(ready, self._threads.map(self._report, ready), strict=True):
            self._last[each.uid] = (now, each.progress if succeeded else self._known(each.uid))
        self._waiting = {each.uid for each in news}
        self._last = {uid: last for uid, last in self._last.items() if now - last[0] < REMEMBERED_SECONDS}

    def _known(self, uid: str) -> JobProgress:
        """What the cluster was told last: by this one a moment ago, or by whomever, as the watch told it."""
        if uid in self._last:
            return self._last[uid][1]
        return self._mirror.told(uid) or NOTHING

    def _is_due(self, report: Report, now: float) -> bool:
        """Whether it is time, or somebody waits for it: for a measurement to plan by, a first step, or the last."""
        known, new = self._known(report.uid), report.progress
        tried_at, _ = self._last.get(report.uid, (-PAUSE_SECONDS, NOTHING))
        awaited = (new.attempt, new.epoch, new.profile_ref) != (known.attempt, known.epoch, known.profile_ref)
        return now - tried_at >= (RETRY_SECONDS if awaited or not report.running else PAUSE_SECONDS)

    def _report(self, report: Report) -> bool:
        return _succeeds(lambda: self._tell_one(report), report.name)

    def _tell_one(self, report: Report) -> None:
        """As it was seen last, or where somebody else wrote meanwhile, as it is now if it is the same job still."""
        place, seen = (report.namespace, report.name, report.uid), self._mirror.version(report.uid)
        try:
            if seen:
                return self._kube.report(place, report.progress, seen)
        except KubeError as error:
            if not error.is_conflict:
                raise
        found = self._kube.get(JOBS, report.namespace, report.name)["metadata"]
        if found["uid"] != report.uid:
            raise KubeError(404, "NotFound", "its name is another's by now")
        return self._kube.report(place, report.progress, found["resourceVersion"])


def _compared(progress: JobProgress) -> dict[str, Any]:
    """What is news where it differs. The speed follows from the rest, and is told with it.

    An earlier version told none, and a cluster whose CRD is of an earlier version keeps none.
    """
    return replace(progress, speed=None).to_manifest()


def config_map(measurement: Measurement, profile: Profile) -> dict[str, Any]:
    """What an attempt measured, where whoever plans finds it; it goes with its job."""
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
    """Whether the cluster took it. One that has no such job any more will say so by its watch too."""
    try:
        call()
    except KubeError as error:
        log.log(logging.DEBUG if error.is_missing else logging.WARNING, "job %s: %s", job, error)
        return False
    return True
