"""Re-planning while a job runs: when steps have drifted, what is slower than measured, and which plan pays.

Problem. A plan suits the hardware that was measured. Hours later another program takes half of a core, or a device
lowers its clock, and one rank holds up all others.

Idea. The medians of the last `WINDOW` steps show the drift, and timelines of a few of these steps its cause: the ratio
of a rank's measured compute time to the simulated one is the factor by which its device is slower now. If no device is,
communication is. What is left of the drift is attributed to everything alike. The job is planned again on the profile
with these factors, next to the run. `choose` compares the present plan with the new ones, all simulated on the
corrected profile, so that an error of the prediction as such is on both sides.

Example: of two equal ranks the second one computes twice as long since step 400. Steps take 0.9 s instead of 0.5 s. A
plan that moves units to the first rank would take 0.65 s, after a restart of 30 s. With 600 steps left, 150 s are saved
at a cost of 30 s, so the attempt is ended. With 100 steps left it is not. A plan with the same stages and other slices,
with a step of 0.8 s, costs two seconds, since ranks change to it between two steps.

Limits. Predictions err, so a plan has to be faster by `LEAST_GAIN`. Hardware that changes all the time would cost a
restart each time: after each re-planning the next drift has to last twice as long.
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
NUM_TIMELINES, MOST_TIMELINES = 3, 9
"""Smallest and largest number of timelines of drifted steps that a new plan is based on."""
EQUAL_RATIO = 1.1
"""Devices whose factors differ by less count as equally fast: cores of a shared machine drift by a tenth."""
LEAST_GAIN = 0.05
"""Smallest part of a step that another plan has to save. Most of a prediction's error is on both sides of the
comparison.
"""
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
    """Whether the drifted step with this number, from 1, gets a timeline: steps 1 to 3, 8 to 10, 16 to 18, 32 to 34 and
    so on, so that a long drift leaves few timelines.
    """
    if num_drifted < WINDOW:
        return 0 < num_drifted <= NUM_TIMELINES
    return num_drifted - (1 << (num_drifted.bit_length() - 1)) < NUM_TIMELINES


def pays(steps_left: int, gain_seconds: float, cost_seconds: float) -> bool:
    """Whether the remaining steps gain more, each by ``gain_seconds``, than it costs."""
    return steps_left * gain_seconds > cost_seconds


def busy_ns_of_ranks(measured: Sequence[Timeline]) -> tuple[float, ...]:
    """Median compute time of every rank in measured steps, without waits for shards inside actions."""
    ranks = range(measured[0].num_ranks)
    return tuple(
        statistics.median(timeline.busy_ns(rank) - timeline.waited_ns(rank) for timeline in measured) for rank in ranks
    )


def device_factors(plan: Plan, simulated: Timeline, busy_ns: Sequence[float], num_devices: int) -> tuple[float, ...]:
    """Measured compute time of every device, divided by the simulated one; 1 for devices that the plan leaves unused.

    ``simulated`` is a step of one replica by the profile; ``busy_ns`` has the compute times of all ranks. Waits for
    shards inside actions do not count.
    """
    factors = [1.0] * num_devices
    devices = plan.devices or tuple(range(plan.num_ranks))
    for rank, device in enumerate(devices):
        own = plan.mesh.pipeline_rank(rank)
        expected = simulated.busy_ns(own) - simulated.waited_ns(own)
        if expected > 0 and busy_ns[rank] > 0:
            factors[device] = busy_ns[rank] / expected
    return tuple(factors)


def as_equal(factors: Sequence[float]) -> tuple[float, ...]:
    """The factors, with groups of about equal ones replaced by their median.

    Factors are divided at their largest gap until those of a group differ by less than `EQUAL_RATIO`. Differences that
    are noise would make devices unequal, and a plan would follow them.
    """
    equal = list(factors)
    groups = [sorted(range(len(factors)), key=lambda index: factors[index])]
    while groups:
        group = groups.pop()
        if not group:
            continue
        if factors[group[-1]] < EQUAL_RATIO * factors[group[0]]:
            median = statistics.median(factors[index] for index in group)
            for index in group:
                equal[index] = median
            continue
        gaps = [factors[group[place]] / factors[group[place - 1]] for place in range(1, len(group))]
        cut = 1 + gaps.index(max(gaps))
        groups += [group[:cut], group[cut:]]
    return tuple(equal)


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift(Manifest):
    """Factors by which hardware is slower than in a profile: each device, communication, and the ``rest``, which is a
    factor of devices and communication alike.
    """

    devices: tuple[float, ...]
    communication: float = 1.0
    rest: float = 1.0

    @property
    def changed_devices(self) -> tuple[int, ...]:
        """The devices whose own factor is not about 1."""
        return tuple(device for device, factor in enumerate(self.devices) if not _is_about_one(factor))

    def __str__(self) -> str:
        """The factors that are not about 1."""
        names = [(f"device {device} takes", self.devices[device]) for device in self.changed_devices]
        if not _is_about_one(self.communication):
            names.append(("communication takes", self.communication))
        if not _is_about_one(self.rest):
            names.append(("everything takes", self.rest))
        texts = [f"{name} {factor:.2f} times as long as measured" for name, factor in names]
        return ", and ".join(texts) or "everything is about as fast as measured"


def _is_about_one(factor: float) -> bool:
    return 1 / EQUAL_RATIO < factor < EQUAL_RATIO


def corrected(profile: Profile, drift: Drift) -> Profile:
    """The profile of the hardware after ``drift``. All times of devices remain those of the first one, to which the
    slowness of the others is relative.
    """
    slowness = profile.slowness or (1.0,) * profile.num_ranks
    now = [slow * factor * drift.rest for slow, factor in zip(slowness, drift.devices, strict=True)]
    first, communication = now[0], drift.communication * drift.rest
    units = tuple(
        dataclasses.replace(
            record,
            alone_seconds=record.alone_seconds * first,
            together_seconds=record.together_seconds * first,
            host_seconds=None if record.host_seconds is None else record.host_seconds * first,
        )
        for record in profile.units
    )
    optimizer = tuple(dataclasses.replace(record, seconds=record.seconds * first) for record in profile.optimizer)
    links = tuple(
        dataclasses.replace(
            link,
            latency_seconds=link.latency_seconds * communication,
            bytes_per_second=link.bytes_per_second / communication,
        )
        for link in profile.links
    )
    collectives = tuple(
        dataclasses.replace(record, seconds=record.seconds * communication) for record in profile.collectives
    )
    relative = tuple(slow / first for slow in now)
    is_even = all(slow == 1.0 for slow in relative)
    return dataclasses.replace(
        profile,
        units=units,
        optimizer=optimizer,
        links=links,
        collectives=collectives,
        action_overhead_seconds=profile.action_overhead_seconds * first,
        slowness=() if is_even else relative,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOption(Manifest):
    """Another plan, and the reasons why it needs a restart; none if the running ranks can change to it."""

    plan: Plan
    restart_reasons: tuple[str, ...] = ()

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step."""
        assert self.plan.prediction is not None, "a plan from a search is predicted"
        return self.plan.prediction.step_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Replanning(Manifest):
    """The profile corrected by ``drift``, and the plans for it.

    ``step_seconds`` is the simulated step of the running plan on the corrected profile.
    """

    profile: Profile
    drift: Drift
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
    saved = {
        index: steps_left * (present - option.step_seconds) - _cost(option, restart_seconds)
        for index, option in enumerate(replanning.options)
        if option.step_seconds <= present * (1 - LEAST_GAIN)
    }
    best = max(saved, key=lambda index: saved[index], default=None)
    if best is None:
        shorter = f"shortens the step of {format_seconds(present)} by {LEAST_GAIN:.0%}"
        return Choice(option=None, reason=f"{replanning.drift}. No plan was found that {shorter}")
    option = replanning.options[best]
    step = f"has a step of {format_seconds(option.step_seconds)} instead of {format_seconds(present)}"
    cost = f"{format_seconds(_cost(option, restart_seconds))} for {_how(option)}"
    if saved[best] <= 0:
        left = f"does not save its cost in {steps_left} more steps: {cost}"
        return Choice(option=None, reason=f"{replanning.drift}. The best other plan {step}, which {left}")
    reason = f"{replanning.drift}. The other plan {step} and saves {format_seconds(saved[best])}, after {cost}"
    return Choice(option=option, reason=reason)


def _cost(option: PlanOption, restart_seconds: float) -> float:
    return restart_seconds if option.restart_reasons else CHANGE_SECONDS


def _how(option: PlanOption) -> str:
    if not option.restart_reasons:
        return "a change in the same processes"
    return f"the restart that it needs because it changes {' and '.join(option.restart_reasons)}"
