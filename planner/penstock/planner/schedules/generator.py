"""What a schedule generator is, and the ones that other packages install."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from penstock.core.errors import PenstockError, UserError
from penstock.core.schedule import Schedule
from penstock.planner.order import Order, from_schedule
from penstock.planner.schedules.inputs import ScheduleInputs

ENTRY_POINT_GROUP = "penstock.schedules"


def one_stage_each(num_ranks: int) -> tuple[int, ...]:
    """Stage s on rank s."""
    return tuple(range(num_ranks))


def along_a_v(num_ranks: int) -> tuple[int, ...]:
    """Stages 0 to K - 1 on ranks 0 to K - 1, and as many again on the way back."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Generator:
    """A pure function from integers to an order, known by name and version.

    A change of its output is a new version, since plans name it. ``uses_costs`` says that costs, stash and caps
    change the order: a recipe then holds the order itself. ``stage_ranks`` places its stages on so many ranks.
    """

    name: str
    version: int
    generate: Callable[[ScheduleInputs], Order]
    uses_costs: bool
    stage_ranks: Callable[[int], tuple[int, ...]] = one_stage_each

    @property
    def stages_per_rank(self) -> int:
        """How many stages each rank has."""
        return len(self.stage_ranks(1))

    def of_shape(self, *, num_ranks: int, num_microbatches: int, num_slices: int) -> Order:
        """The order where every action costs the same."""
        inputs = ScheduleInputs(
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_slices=num_slices,
            stages_per_rank=self.stages_per_rank,
        )
        return self.generate(inputs)


def installed_generators() -> dict[str, Generator]:
    """Generators of other packages, by the name of their entry point in the group ``penstock.schedules``.

    An entry point is a function from `ScheduleInputs` to `core.schedule.Schedule`. It is called while planning; a plan
    records the order it gave, which ranks replay, so a later change of it leaves plans as they are. Its version is 1.
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
    remedy = "mend or uninstall the package that provides it"
    try:
        schedule = point.load()(inputs)
    except PenstockError:
        raise
    except Exception as error:
        raise UserError(what=f"failed with {type(error).__name__}: {error}", where=where, remedy=remedy) from error
    if not isinstance(schedule, Schedule):
        raise UserError(what=f"returned {type(schedule).__name__}, not a Schedule", where=where, remedy=remedy)
    return from_schedule(schedule)
