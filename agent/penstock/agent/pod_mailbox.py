"""The mailbox of an attempt in a pod: files that the kubelet refreshes, and the container's termination message.

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
from penstock.core.pod import (
    MEASURE_EPOCH,
    PodBinding,
    termination_message,
)
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.core.supervision import AttemptReport, Binding, Wish

PLAN_SECONDS = 300.0
"""How much later than its binding a plan may come: the kubelet refreshes a ConfigMap once a minute or so."""


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
        agent: AgentFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent = agent
        self._files, self._run, self._say, self._clock = files, run, say, clock
        self._pod_uid, self._attempt = pod_uid, attempt
        self._told: AttemptReport | None = None
        self._bound_at: float | None = None

    @property
    def place(self) -> PodBinding | None:
        """The binding as it is now, if it is for this pod."""
        text = read_text(self._files.binding)
        if not text:
            return None
        try:
            binding = PodBinding.from_manifest(jsontext.load(text), "binding")
        except ValueError as error:
            raise UserError(what=f"is no JSON: {error}", where=str(self._files.binding)) from None
        return binding if (binding.pod_uid, binding.attempt) == (self._pod_uid, self._attempt) else None

    def wished(self, wish: Wish) -> bool:
        if wish is Wish.STOP:
            return bool(read_text(self._files.stop))
        place = self.place
        return place is not None and place.epoch == MEASURE_EPOCH

    def binding(self) -> Binding | None:
        """The binding; none also until the plan has arrived. Raises `RunError` if the plan does not arrive."""
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
            raise RunError(f"{self._files.plan}: {problem} after {PLAN_SECONDS:.0f} s")
        return None

    def _put(self, plan: Plan) -> None:
        """Write the plan unless another pod did: its ranks may read it now, and NFS fails reads of a replaced file."""
        with contextlib.suppress(UserError):
            if self._run.read_plan() == plan:
                return
        write_json(self._run.plan, plan.to_manifest())

    def _plan(self, digest: str) -> tuple[Plan | None, str]:
        """The plan with this digest, or the problem of the file."""
        try:
            plan = Plan.from_manifest(unpack(self._files.plan.read_bytes()), "plan")
        except FileNotFoundError:
            return None, f"plan {digest[:12]} is not there"
        except (OSError, UnpackError) as error:
            return None, f"cannot be read: {error}"
        if plan.digest != digest:
            return None, f"holds plan {plan.digest[:12]}, and the pod is bound to {digest[:12]}"
        return plan, ""

    def tell(self, report: AttemptReport) -> None:
        """Report the end to the cluster, earlier states to the agent, and changes to people in the log."""
        if self._told is None or (report.state, report.profile) != (self._told.state, self._told.profile):
            self._say(f"{report.state}, profile {report.profile}{': ' * bool(report.message)}{report.message}")
        self._told = report
        if self._agent is not None:
            self._agent.tell(report)
        if report.ended:
            explained_report = explained(report, self._files.cgroups)
            self._files.termination.write_text(termination_message(explained_report))
