"""Mailbox of an attempt in a pod: files that the kubelet refreshes, and the container's termination message.

`penstock.core.pod` lists the files and their writers. The pod sends no requests: it reads, writes the files that its
agent serves, and reports once at its end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from penstock.agent.endpoint import AgentFiles
from penstock.agent.pod_files import PodFiles, read_text
from penstock.agent.pod_memory import explained
from penstock.core import jsontext
from penstock.core.errors import RunError, UserError
from penstock.core.packing import UnpackError, unpack
from penstock.core.plan import Plan
from penstock.core.pod import BINDING_FILE, MEASURE_EPOCH, PLAN_FILE, STOP_FILE, PodBinding, termination_message
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.core.supervision import AttemptReport, Binding, SupervisorRequest

PLAN_SECONDS = 300.0
"""Time after its binding within which a plan must arrive: the kubelet refreshes a ConfigMap about once a minute."""


class PodMailbox:
    """The `penstock.agent.mailbox.Mailbox` of attempt ``attempt`` in the pod ``pod_uid``; ``say`` gets changes.

    A plan of the binding is put into ``run``, and reports go to ``agent``.
    """

    def __init__(
        self,
        files: PodFiles,
        run: RunDir,
        pod_uid: str,
        attempt: int,
        *,
        say: Callable[[str], None],
        agent: AgentFiles,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent = agent
        self._files, self._run, self._say, self._clock = files, run, say, clock
        self._pod_uid, self._attempt = pod_uid, attempt
        self._last_report: AttemptReport | None = None
        self._bound_at: float | None = None

    @property
    def place(self) -> PodBinding | None:
        """Return the current binding, if it is for this pod."""
        path = self._files.pod / BINDING_FILE
        text = read_text(path)
        if not text:
            return None
        try:
            binding = PodBinding.from_manifest(jsontext.load(text), "binding")
        except ValueError as error:
            remedy = "delete the pod: the next attempt writes the annotation again"
            raise UserError(what=f"is not JSON: {error}", where=str(path), remedy=remedy) from None
        return binding if (binding.pod_uid, binding.attempt) == (self._pod_uid, self._attempt) else None

    def is_requested(self, request: SupervisorRequest) -> bool:
        if request is SupervisorRequest.STOP:
            return bool(read_text(self._files.pod / STOP_FILE))
        place = self.place
        return place is not None and place.epoch == MEASURE_EPOCH

    def binding(self) -> Binding | None:
        """Return the binding; none until the plan has arrived. Raises `RunError` if the plan does not arrive."""
        place = self.place
        if place is None or place.epoch == MEASURE_EPOCH:
            return None
        if self._bound_at is None:
            self._bound_at = self._clock()
        plan, problem = self._plan(place.plan_digest)
        if plan is not None:
            self._put(plan)
            return Binding(plan_digest=plan.digest)
        if self._clock() >= self._bound_at + PLAN_SECONDS:
            raise RunError(f"{self._files.attempt / PLAN_FILE}: {problem} after {PLAN_SECONDS:.0f} s")
        return None

    def _put(self, plan: Plan) -> None:
        """Write the plan unless another pod did: its ranks may read it now, and NFS fails reads of a replaced file."""
        with contextlib.suppress(UserError):
            if self._run.read_plan() == plan:
                return
        write_json(self._run.plan, plan.to_manifest())

    def _plan(self, digest: str) -> tuple[Plan | None, str]:
        """Return the plan with this digest, or the problem of its file."""
        try:
            plan = Plan.from_manifest(unpack((self._files.attempt / PLAN_FILE).read_bytes()), "plan")
        except FileNotFoundError:
            return None, f"plan {digest[:12]} has not arrived"
        except (OSError, UnpackError) as error:
            return None, f"cannot be read: {error}"
        if plan.digest != digest:
            return None, f"holds plan {plan.digest[:12]}, and the pod is bound to {digest[:12]}"
        return plan, ""

    def report(self, report: AttemptReport) -> None:
        """Write the end to the termination message, earlier states to the agent's files, and changes to the log."""
        if self._last_report is None or (report.state, report.profile) != (
            self._last_report.state,
            self._last_report.profile,
        ):
            detail = f": {report.message}" if report.message else ""
            self._say(f"attempt {report.state}, profile {report.profile}{detail}")
        self._last_report = report
        self._agent.update(report)
        if report.ended:
            explained_report = explained(report, self._files.cgroups)
            self._files.termination.write_text(termination_message(explained_report))
