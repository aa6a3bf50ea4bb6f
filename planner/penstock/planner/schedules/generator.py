"""Schedule generators, and those that other packages install."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from penstock.core.errors import PenstockError, UserError
from penstock.core.schedule import Schedule
from penstock.planner.order import Order, from_schedule
from penstock.planner.passes.rounds import can_join
from penstock.planner.schedules.inputs import ScheduleInputs

ENTRY_POINT_GROUP = "penstock.schedules"


def looped(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Stage s on rank s mod K (interleaved 1F1B, arXiv 2104.04473); with one stage per rank, stage s on rank s."""
    return (*range(num_ranks),) * stages_per_rank


def in_waves(num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Down the ranks, up again, and so on: with two stages per rank a V, with four a W."""
    down = tuple(range(num_ranks))
    return tuple(rank for number in range(stages_per_rank) for rank in (reversed(down) if number % 2 else down))


@dataclass(frozen=True, kw_only=True, slots=True)
class Generator:
    """A pure function from integers to an order, known by name and version.

    A change of its output needs a new version, since plans name it. ``uses_costs``: costs, stash and caps change the
    order, so a recipe holds the order itself. ``place`` gives the rank of every stage for numbers of ranks and stages
    per rank. A rank has ``stages_per_rank`` stages; if the schedule ``is_virtual``, a plan may have any number of at
    least two.

    The search tries the schedule by itself if it ``is_searched``; others are for pins. ``splits_backward``: it runs I
    and W instead of B. ``repeats``: its steps repeat, and its ranks do not hold more the longer they run.
    ``is_like_1f1b``: its ranks hold what those of 1F1B hold. ``usual`` names the schedule whose order an adaptive one
    has if memory suffices.
    """

    name: str
    version: int
    generate: Callable[[ScheduleInputs], Order]
    uses_costs: bool
    place: Callable[[int, int], tuple[int, ...]] = looped
    stages_per_rank: int = 1
    is_virtual: bool = False
    is_searched: bool = False
    splits_backward: bool = False
    repeats: bool = False
    is_like_1f1b: bool = False
    usual: str | None = None

    def stage_ranks(self, num_ranks: int, num_stages: int | None = None) -> tuple[int, ...]:
        """The rank of every stage."""
        return self.place(num_ranks, self.per_rank(num_ranks, num_stages))

    def per_rank(self, num_ranks: int, num_stages: int | None = None) -> int:
        """Stages of each rank for a plan with ``num_stages``; the usual number if it is not possible."""
        quotient, rest = divmod(num_stages or 0, num_ranks)
        return quotient if rest == 0 and self.is_virtual and quotient > 1 else self.stages_per_rank

    def of_shape(
        self, *, num_ranks: int, num_microbatches: int, num_slices: int, num_stages: int | None = None
    ) -> Order:
        """The order if every action costs the same."""
        inputs = ScheduleInputs(
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_slices=num_slices,
            stages_per_rank=self.per_rank(num_ranks, num_stages),
        )
        return self.generate(inputs)


def installed_generators() -> dict[str, Generator]:
    """Generators of other packages, by the name of their entry point in the group ``penstock.schedules``.

    An entry point is a function from `ScheduleInputs` to `core.schedule.Schedule`. It is called while planning. A plan
    records the resulting order, which ranks replay, so later changes of the function do not affect plans. Its version
    is 1.
    """
    return {point.name: _installed(point) for point in entry_points(group=ENTRY_POINT_GROUP)}


def _installed(point: EntryPoint) -> Generator:
    return Generator(
        name=point.name,
        version=1,
        generate=lambda inputs: _call(point, inputs),
        uses_costs=True,
    )


def _call(point: EntryPoint, inputs: ScheduleInputs) -> Order:
    where = f"schedule {point.name} ({point.value})"
    remedy = "fix or uninstall the package that provides it"
    try:
        schedule = point.load()(inputs)
    except PenstockError:
        raise
    except Exception as error:
        raise UserError(what=f"failed with {type(error).__name__}: {error}", where=where, remedy=remedy) from error
    if not isinstance(schedule, Schedule):
        raise UserError(what=f"returned {type(schedule).__name__}, not a Schedule", where=where, remedy=remedy)
    # Overlaps whose actions cannot start together run one after the other, for any number of shards per rank.
    return from_schedule(schedule, keep_pairs=can_join(schedule))
