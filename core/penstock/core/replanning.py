"""Re-planning while a job runs: when steps have drifted, which devices are slower than measured, and which plan pays.

Problem. A plan suits the hardware that was measured. Hours later another program takes half of a core, or a device
lowers its clock, and one rank holds up all others.

Idea. The medians of the last `WINDOW` steps show the drift, and timelines of a few of these steps its cause: the ratio
of a rank's measured compute time to the simulated one is the factor by which its device is slower now. The profile with
these factors is planned for again, next to the run. `choose` compares the present plan with the new ones, all simulated
on the corrected profile, so that an error of the prediction as such is on both sides.

Example: of two equal ranks the second one computes twice as long since step 400. Steps take 0.9 s instead of 0.5 s. A
plan that moves units to the first rank would take 0.65 s, after a restart of 30 s. With 600 steps left, 150 s of work
are saved for 30 s, and the job is stopped for it. With 100 steps left it is not. A plan with other slices and the same
stages, of 0.8 s, costs one second, since ranks take it between two steps.

Limits. Predictions err by some percent, so a plan has to be faster by `LEAST_GAIN`. Hardware that changes all the time
would cost a restart each time: after each re-planning the next drift has to last twice as long.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.manifest import Manifest
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.timeline import Timeline
from penstock.core.units import format_seconds

DRIFTED_RATIO, SETTLED_RATIO = 1.3, 1.15
"""Hysteresis: a drifted job counts as settled only well below `DRIFTED_RATIO`, or it would change its state often."""
WINDOW = 8
"""Number of the newest steps whose median is compared with the prediction."""
NUM_TIMELINES = 3
"""Number of timelines of drifted steps that a new plan is based on."""
EQUAL_RATIO = 1.1
"""A device counts as fast as measured up to this factor: cores of a shared machine drift by a tenth."""
LEAST_GAIN = 0.05
"""Smallest part of a step that another plan has to save: predictions are wrong by up to 6 %."""
CHANGE_SECONDS = 2.0
"""Cost of another plan in the same processes: ranks compile its Program and allocate its arena."""


def drift_ratio(measured: float, predicted: float) -> float:
    """Factor between the two, at least 1, in either direction."""
    return max(measured / predicted, predicted / measured)


def is_drifted(step_seconds: Sequence[float], predicted: float, *, was_drifted: bool) -> bool:
    """Whether the median of the newest `WINDOW` steps differs from the prediction; false before there are as many."""
    if len(step_seconds) < WINDOW:
        return False
    limit = SETTLED_RATIO if was_drifted else DRIFTED_RATIO
    return drift_ratio(statistics.median(step_seconds[-WINDOW:]), predicted) > limit


def is_sampled(num_drifted: int) -> bool:
    """Whether the step after ``num_drifted`` drifted ones gets a timeline: the first three, and three each time that
    their number has doubled. So a long drift leaves few timelines.
    """
    if num_drifted < WINDOW:
        return 0 < num_drifted <= NUM_TIMELINES
    return num_drifted - (1 << (num_drifted.bit_length() - 1)) < NUM_TIMELINES


def pays(steps_left: int, gain_seconds: float, cost_seconds: float) -> bool:
    """Whether the remaining steps gain more, each by ``gain_seconds``, than it costs."""
    return steps_left * gain_seconds > cost_seconds


def device_factors(
    plan: Plan, simulated: Timeline, measured: Sequence[Timeline], num_devices: int
) -> tuple[float, ...]:
    """For every device, how many times as long it computes as it was simulated; 1 for devices that the plan leaves
    unused.

    ``simulated`` is a step of one replica by the profile; ``measured`` are steps of all ranks. Waits for shards inside
    actions do not count.
    """
    factors = [1.0] * num_devices
    devices = plan.devices or tuple(range(plan.num_ranks))
    for rank, device in enumerate(devices):
        own = rank // plan.tp % plan.pp
        expected = simulated.busy_ns(own) - simulated.waited_ns(own)
        busy = statistics.median(timeline.busy_ns(rank) - timeline.waited_ns(rank) for timeline in measured)
        if expected > 0 and busy > 0:
            factors[device] = busy / expected
    return tuple(factors)


def corrected(profile: Profile, factors: Sequence[float]) -> Profile:
    """The profile of devices that compute by these factors longer; unit costs stay those of the first device."""
    slowness = profile.slowness or (1.0,) * profile.num_ranks
    now = [slow * factor for slow, factor in zip(slowness, factors, strict=True)]
    first = now[0]
    units = tuple(
        dataclasses.replace(
            record,
            alone_seconds=record.alone_seconds * first,
            together_seconds=record.together_seconds * first,
        )
        for record in profile.units
    )
    relative = tuple(slow / first for slow in now)
    is_even = all(slow == 1.0 for slow in relative)
    return dataclasses.replace(profile, units=units, slowness=() if is_even else relative)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOption(Manifest):
    """Another plan, and the reasons for which it needs a restart; empty if the running ranks can take it."""

    plan: Plan
    restart_reasons: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step."""
        assert self.plan.prediction is not None, "a plan from a search is predicted"
        return self.plan.prediction.step_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanning(Manifest):
    """The profile corrected by ``factors``, one for each device, and the plans for it.

    ``step_seconds`` is the simulated step of the running plan on the corrected profile.
    """

    profile: Profile
    factors: tuple[float, ...]
    step_seconds: float
    options: tuple[PlanOption, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The option to take, None to keep the present plan; ``reason`` has the figures in one sentence."""

    option: PlanOption | None
    reason: str


def choose(replanning: Replanning, steps_left: int, restart_seconds: float) -> Choice:
    """The option that saves most time over the remaining steps after its own cost, if any saves some.

    An option has to shorten the step by `LEAST_GAIN` of it.
    """
    present = replanning.step_seconds
    cause = _cause(replanning.factors)
    saved = {
        index: steps_left * (present - option.step_seconds) - _cost(option, restart_seconds)
        for index, option in enumerate(replanning.options)
        if option.step_seconds <= present * (1 - LEAST_GAIN)
    }
    best = max(saved, key=lambda index: saved[index], default=None)
    if best is None:
        reason = f"{cause}; no plan was found that shortens the step of {format_seconds(present)} by {LEAST_GAIN:.0%}"
        return Choice(option=None, reason=reason)
    option = replanning.options[best]
    steps = f"a step of {format_seconds(option.step_seconds)} instead of {format_seconds(present)}"
    cost = f"{format_seconds(_cost(option, restart_seconds))} for {_how(option)}"
    if saved[best] <= 0:
        reason = f"{cause}; another plan has {steps}, which does not pay for {steps_left} more steps: it costs {cost}"
        return Choice(option=None, reason=reason)
    reason = f"{cause}; another plan has {steps}, and saves {format_seconds(saved[best])} after {cost}"
    return Choice(option=option, reason=reason)


def _cost(option: PlanOption, restart_seconds: float) -> float:
    return restart_seconds if option.restart_reasons else CHANGE_SECONDS


def _how(option: PlanOption) -> str:
    if not option.restart_reasons:
        return "a change in the same processes"
    return f"a restart, because it changes {' and '.join(option.restart_reasons)}"


def _cause(factors: Sequence[float]) -> str:
    changed = {device: factor for device, factor in enumerate(factors) if factor != 1}
    texts = [f"device {device} computes {factor:.2f} times as long" for device, factor in changed.items()]
    return " and ".join(texts) or "all devices compute as fast as measured"
