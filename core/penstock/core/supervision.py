"""Communication between a service and the supervisor of an attempt, by small files in the attempt's folder.

The service writes the order, requests and the binding; the supervisor its claim and its report. Each file has one
writer and is replaced as a whole. So either side may be killed at any moment, and the other reads the latest version.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.core.lifecycle import AttemptState, Step
from penstock.core.manifest import Manifest


class SupervisorRequest(enum.StrEnum):
    """A request from a service to a supervisor, made once."""

    MEASURE = "measure"
    STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class Order(Manifest):
    """What to supervise: an attempt of the job in the run directory, until ``deadline_at`` (seconds since the epoch).

    Its records go to the service whose `Address` is in ``address_file``, with the token in ``token_file``; to none if
    no file is named. Both are read repeatedly, because an attempt outlives services. ``devices`` are the CUDA devices
    that only this attempt uses, by the names that CUDA_VISIBLE_DEVICES takes.
    """

    uid: str
    attempt: int
    deadline_at: float | None = None
    address_file: str = ""
    token_file: str = ""
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Address(Manifest):
    """The current address of the service: its URL, and for HTTPS the file of its certificate."""

    server: str
    ca_file: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim(Manifest):
    """The process that supervises the attempt. After a reboot another process may have the same ``pid``."""

    pid: int
    started_ticks: int
    boot_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding(Manifest):
    """Train by the plan with this digest, which is in the run directory."""

    plan_digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptReport(Manifest):
    """State of the attempt. ``refused``: it failed for a reason that a retry would not fix.

    ``last_words`` are the last output of the rank at fault; ``done`` and ``total`` count measured points;
    ``last_checkpoint`` is the step of the newest complete one, of any attempt. ``last_step_at`` is when the last step
    was observed, in seconds since the epoch: slightly after the step.

    ``replanning`` is the last decision of planning again. With ``better_plan`` there is a plan for which the attempt is
    to end. ``plan_digest`` names a plan that the attempt did not begin with and that is now in the run directory:
    the ranks have changed to it, or the attempt has ended for it.
    """

    state: AttemptState
    profile: Step = Step.MISSING
    num_ranks: int = 0
    message: str = ""
    last_words: tuple[str, ...] = ()
    refused: bool = False
    done: int = 0
    total: int = 0
    last_checkpoint: int | None = None
    last_step_at: float | None = None
    replanning: str = ""
    better_plan: bool = False
    plan_digest: str = ""

    @property
    def ended(self) -> bool:
        """Whether no other state follows."""
        return self.state in (AttemptState.SUCCEEDED, AttemptState.FAILED, AttemptState.STOPPED)
