"""A Plan: all decisions about a run, and its prediction. Nothing else is decided at run time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Annotated, Any, Self

from penstock.core.bubble import Lost
from penstock.core.errors import UserError
from penstock.core.explanation import Explanation
from penstock.core.layout import Precision, Remade
from penstock.core.limits import (
    MOST_AHEAD,
    MOST_BATCH,
    MOST_LABELS,
    MOST_LAYERS,
    MOST_RANKS,
    MOST_REMAKES,
    MOST_SLICES,
    MOST_WIDTH,
    MOST_ZERO,
    list_of,
    one_to,
    up_to,
)
from penstock.core.manifest import Manifest, require_limits
from penstock.core.mesh import Mesh
from penstock.core.model import ModelSpec
from penstock.core.moments import MomentType
from penstock.core.profile import digest
from penstock.core.remaking import Recompute, RecomputePin, Remakes, check_remakes, remade_of, uniform_remakes
from penstock.core.replicas import ReductionType
from penstock.core.schedule import CSV, ScheduleSpec, parse_schedule
from penstock.core.sharding import Sharding
from penstock.core.speed import Speed, speed_of
from penstock.core.units import format_count


def slices_text(slices: Iterable[int]) -> str:
    """Lengths in tokens, runs of equal ones as ``3×256``."""
    runs = ((length, sum(1 for _ in run)) for length, run in groupby(slices))
    return ", ".join(f"{count}×{length}" if count > 1 else f"{length}" for length, count in runs)


def microbatches_text(count: int, size: int, remainder: int = 0) -> str:
    """Text of ``count`` micro-batches of ``size`` sequences, the last of which may have fewer."""
    alike = count - (remainder > 0)
    batches = f"{format_count(alike, 'micro-batch', 'micro-batches')} of {size}"
    return f"{batches} and one of {remainder}" if remainder else batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction(Manifest):
    """Seconds of one step and their parts on the busiest rank, and bytes per rank.

    ``step_seconds`` = compute + bubble (waiting for other ranks) + communication (waiting only for transfers) +
    reduction + optimizer. ``peak_bytes`` is per pipeline rank, with the memory of its process; ``slot_bytes`` are
    the arenas.

    A step is expected between ``low_seconds`` and ``high_seconds``, by the spread of the measurements behind the
    prediction, or by the error that a description states. ``warnings`` are reasons for larger errors. ``bubble`` and
    ``waiting`` are those of all ranks (`penstock.core.bubble`); plans of version 0.1.0 have none. ``peak_flops`` is the
    peak of one device, if known, and ``speed`` follows from it. ``explanation`` has the reasons for this plan.
    """

    step_seconds: float
    compute_seconds: float
    bubble_seconds: float
    communication_seconds: float
    reduction_seconds: float
    optimizer_seconds: float
    peak_bytes: Annotated[tuple[int, ...], list_of(MOST_RANKS)]
    slot_bytes: Annotated[tuple[int, ...], list_of(MOST_RANKS)]
    low_seconds: float | None = None
    high_seconds: float | None = None
    warnings: tuple[str, ...] = ()
    bubble: Lost | None = None
    waiting: Lost | None = None
    peak_flops: float | None = None
    speed: Speed | None = None
    explanation: Explanation | None = None

    @property
    def waiting_text(self) -> str:
        """Text of the time that ranks wait for others: over all ranks if known, else on the busiest one."""
        if self.waiting is not None:
            return self.waiting.text
        return f"{self.bubble_seconds / (self.step_seconds or 1.0):.1%} on the busiest rank"

    def __post_init__(self) -> None:
        require_limits(self)
        if len(self.peak_bytes) != len(self.slot_bytes):
            raise UserError(
                what=f"has {len(self.peak_bytes)} peaks and {len(self.slot_bytes)} sizes of slots",
                where="peakBytes",
                remedy="plan again",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost(Manifest):
    """Cost of running by a plan, in the currency of a device's price: for an hour, a million tokens, and all steps.

    It is not part of the plan: prices change, plans do not.
    """

    per_hour: float
    per_million_tokens: float
    whole_job: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTime(Manifest):
    """Predicted time of all steps of a job. Of it, ``interruption_seconds`` are due to ``interruptions``, as many as
    are expected on spot devices: restarts, and steps that are done again.
    """

    seconds: float
    interruptions: float = 0.0
    interruption_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative(Manifest):
    """A plan that was considered: a label, its predicted step and bytes, and the reason why it was not chosen.

    ``speed`` is the speed of its step. The alternative may use fewer devices than the chosen plan.
    """

    label: str
    step_seconds: float | None
    peak_bytes: int | None
    reason: str
    speed: Speed | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Manifest):
    """How a job runs.

    ``stages`` are ranges [first, stop) of units, in order; ``slices`` are lengths in tokens whose sum is the sequence
    length; ``microbatch`` is the number of sequences in a micro-batch; each of the ``dp`` replicas runs
    ``num_microbatches`` of them. The last one may be smaller: it then has ``remainder`` sequences, in
    ``remainder_slices``, which are at most as many as ``slices``. They are 0 and empty if all micro-batches are alike.

    At most ``receive_ahead`` receives of a channel are posted: as early as possible, or with ``late_receives`` when
    their messages are due. The latter is for NCCL, where a posted receive occupies its device
    (`penstock.planner.passes.transfers`). With ``prefix_by_slice`` every slice has its own buffers for keys, values and
    their gradients, which are freed with its backward; otherwise a micro-batch has one buffer of each. With
    ``split_slots`` a slot may lie in several extents of its rank's arena (`penstock.core.extents`). ``moment_type`` is
    the type of the optimizer's moments.

    ``recompute`` is the recomputation of every stage (`penstock.core.remaking`), empty if all stages keep everything. A
    stage without an R in the schedule gets one for each backward: ``recompute_ahead`` actions of its rank earlier, as
    far as its forward permits. With ``recompute_inside`` it gets none and recomputes inside its backwards.

    ``head_parts`` units share the head's vocabulary, the last of ``model.units``
    (`penstock.core.model.DividedModel`). With ``zero`` 1 the replicas divide the optimizer state (ZeRO-1,
    `penstock.core.replicas`); with one replica it is 0. Each pipeline rank's units are shared by ``tp`` shards, hidden
    states by tokens with ``sequence_parallel`` (`penstock.core.sharding`).

    ``placement`` maps pipeline ranks (dp-major: replica * pp + stage's rank) to the number of their first device; their
    other shards have the devices after it (`devices`). Empty means in order.
    """

    model: ModelSpec
    precision: Precision
    moment_type: MomentType = MomentType.FP32
    gradient_reduction_type: ReductionType = ReductionType.FP32
    dp: Annotated[int, one_to(MOST_RANKS)] = 1
    tp: Annotated[int, one_to(MOST_RANKS)] = 1
    sequence_parallel: bool = True
    pp: Annotated[int, one_to(MOST_RANKS)]
    microbatch: Annotated[int, one_to(MOST_BATCH)]
    num_microbatches: Annotated[int, one_to(MOST_BATCH)]
    slices: Annotated[tuple[int, ...], list_of(MOST_SLICES, minItems=1, items=one_to(MOST_WIDTH))]
    stages: Annotated[tuple[tuple[int, int], ...], list_of(2 * MOST_LAYERS + 2)]
    schedule: ScheduleSpec
    receive_ahead: Annotated[int, one_to(MOST_BATCH)] = 2
    late_receives: bool = False
    prefix_by_slice: bool = False
    split_slots: bool = False
    placement: Annotated[tuple[int, ...], list_of(MOST_RANKS)] = ()
    remainder: Annotated[int, up_to(MOST_BATCH)] = 0
    remainder_slices: Annotated[tuple[int, ...], list_of(MOST_SLICES, items=one_to(MOST_WIDTH))] = ()
    head_parts: Annotated[int, one_to(MOST_RANKS)] = 1
    zero: Annotated[int, up_to(MOST_ZERO)] = 0
    recompute: Annotated[tuple[Remakes, ...], list_of(2 * MOST_LAYERS + 2, items=list_of(MOST_REMAKES))] = ()
    recompute_ahead: Annotated[int, up_to(MOST_AHEAD)] = 0
    recompute_inside: bool = False
    program_digest: str = ""
    profile_digest: str = ""
    prediction: Prediction | None = None
    reasons: Annotated[tuple[str, ...], list_of(MOST_LABELS)] = ()
    alternatives: Annotated[tuple[Alternative, ...], list_of(MOST_LABELS)] = ()

    def __post_init__(self) -> None:
        require_limits(self)
        object.__setattr__(self, "model", self.model.divided(self.head_parts))
        self._check_stages()
        self._check_zero()
        self._check_placement()
        self._check_remainder()
        self._check_recompute()

    def _check_zero(self) -> None:
        if self.zero and self.dp == 1:
            raise UserError(
                what=f"{self.zero} divides the optimizer's state between replicas, of which there is one",
                where="zero",
                remedy="write 0, or leave it out",
            )

    @property
    def optimizer_shards(self) -> int:
        """Number of shards into which replicas divide the optimizer state; 1 if each has all of it."""
        return self.dp if self.zero else 1

    def obeys_zero(self, pin: int | None) -> bool:
        """Whether the plan divides the optimizer state as the pin requires; one replica has nothing to divide."""
        return self.dp == 1 or pin in (None, self.zero)

    def _check_recompute(self) -> None:
        if self.recompute and len(self.recompute) != len(self.stages):
            raise UserError(
                what=f"has entries for {len(self.recompute)} stages, the plan has {len(self.stages)}",
                where="recompute",
                remedy="give a list for each stage, empty where it keeps everything, or leave it out",
            )
        for number, remakes in enumerate(self.recompute):
            check_remakes(self.model, self.stages[number], remakes, f"recompute[{number}]")

    @property
    def remade(self) -> tuple[Remade, ...]:
        """By stage, the operations that each of its units runs again."""
        recompute = self.recompute or ((),) * len(self.stages)
        return tuple(
            remade_of(self.model, *stage_remakes) for stage_remakes in zip(self.stages, recompute, strict=True)
        )

    def _check_placement(self) -> None:
        distinct = {device for device in self.devices if device >= 0}
        if self.placement and not len(distinct) == len(self.devices) == self.num_ranks:
            raise UserError(
                what=f"does not give each of {self.num_ranks} ranks a device of its own",
                where="placement",
                remedy="plan again, or leave it out",
            )

    def _check_remainder(self) -> None:
        if not self.remainder and not self.remainder_slices:
            return
        if not 0 < self.remainder < self.microbatch or self.num_microbatches < 2:
            raise UserError(
                what=(
                    f"{self.remainder} sequences do not make a smaller micro-batch after {self.num_microbatches - 1} "
                    f"micro-batches of {self.microbatch}"
                ),
                where="remainder",
                remedy=f"write 1 to {self.microbatch - 1} with two micro-batches or more, or leave it out",
            )
        is_shorter = 0 < len(self.remainder_slices) <= len(self.slices)
        if not is_shorter or sum(self.remainder_slices) != self.sequence_length:
            raise UserError(
                what=f"are {len(self.remainder_slices)} slices of {sum(self.remainder_slices)} tokens",
                where="remainderSlices",
                remedy=f"write 1 to {len(self.slices)} lengths whose sum is {self.sequence_length}",
            )

    def _check_stages(self) -> None:
        reached = 0
        for i, (first, stop) in enumerate(self.stages):
            if first != reached or stop <= first:
                raise UserError(what=f"starts at unit {first}, not {reached}, or is empty", where=f"stages[{i}]")
            reached = stop
        if reached != self.model.num_units:
            raise UserError(
                what=f"end at unit {reached}, but the model has {self.model.num_units}",
                where="stages",
                remedy="make the stages cover every unit",
            )
        if len(self.stages) % self.pp:
            raise UserError(what=f"{len(self.stages)} stages do not spread evenly over pp {self.pp}", where="stages")

    @property
    def sharding(self) -> Sharding:
        """The division of a pipeline rank's units over shards."""
        return Sharding(self.tp, self.sequence_parallel)

    @property
    def num_ranks(self) -> int:
        """Number of ranks, and of devices: dp x tp x pp."""
        return self.mesh.num_ranks

    @property
    def mesh(self) -> Mesh:
        """The numbering of the ranks."""
        return Mesh(dp=self.dp, tp=self.tp, pp=self.pp, kv_copies=self.model.kv_copies(self.tp))

    @property
    def mesh_text(self) -> str:
        """Text of the mesh and of what is divided over it."""
        return f"{self.mesh.text}{self.shards_text}{self.head_text}{self.zero_text}"

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of every global rank in the numbering of `Mesh`; empty means in order."""
        return tuple(device for first in self.placement for device in range(first, first + self.tp))

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence."""
        return sum(self.slices)

    @property
    def global_batch(self) -> int:
        """Sequences of one step over all replicas."""
        return self.dp * self.num_sequences

    @property
    def num_sequences(self) -> int:
        """Sequences of one step of a replica."""
        return self.num_alike * self.microbatch + self.remainder

    @property
    def num_alike(self) -> int:
        """Micro-batches of a replica without a smaller last one."""
        return self.num_microbatches - (self.remainder > 0)

    def is_remainder(self, microbatch: int) -> bool:
        """Whether the micro-batch with this number is smaller than the others."""
        return self.remainder > 0 and microbatch == self.num_microbatches - 1

    @property
    def microbatches_text(self) -> str:
        """Text of the numbers of micro-batches and their sequences."""
        return microbatches_text(self.num_microbatches, self.microbatch, self.remainder)

    @property
    def shards_text(self) -> str:
        """Text of how shards share hidden states, to follow the mesh; empty in the usual case."""
        return "" if self.sharding.by_tokens or self.tp == 1 else " (not sequence parallel)"

    @property
    def blocks(self) -> tuple[float, ...] | None:
        """Blocks per stage, as a job pins them: attention and MLP are a half each, embedding and head nothing.

        None if these do not determine the stages: with a divided head such a pin gives each of the last stages one
        part.
        """
        units = range(1, 1 + 2 * self.model.layers)
        half_blocks = [len(units[max(first - 1, 0) : max(stop - 1, 0)]) for first, stop in self.stages]
        parts = [stop - first - count for (first, stop), count in zip(self.stages, half_blocks, strict=True)]
        last = parts[-self.head_parts :]
        last[0] -= len(self.stages) == self.head_parts  # the embedding
        return tuple(count / 2 for count in half_blocks) if last == [1] * self.head_parts else None

    def recomputes(self, pin: RecomputePin) -> bool:
        """Whether stages recompute what the pin requires, except stages with recomputation in the schedule itself."""
        imported = self._imported_recompute_stages
        if isinstance(pin, Recompute):
            pinned = [uniform_remakes(self.model, stage, pin.operations) for stage in self.stages]
        elif len(pin) == len(self.stages):
            pinned = list(pin)
        else:
            return False
        return all(
            remade_of(self.model, stage, remakes) == remade
            for number, (stage, remakes, remade) in enumerate(zip(self.stages, pinned, self.remade, strict=True))
            if number not in imported
        )

    @property
    def lacks_recompute(self) -> bool:
        """Whether its CSV schedule has an R of a stage without an entry in ``recompute``: version 0.1.0 had no such
        field.
        """
        return any(not self.recompute or not self.recompute[stage] for stage in self._imported_recompute_stages)

    @property
    def _imported_recompute_stages(self) -> frozenset[int]:
        """The stages with an R in a CSV schedule."""
        is_imported = self.schedule.generator == CSV
        return parse_schedule(self.schedule.text)[0].recomputed_stages if is_imported else frozenset()

    @property
    def recompute_pin(self) -> RecomputePin | None:
        """The recomputation, as a job pins it: by a name if one fits, else stage by stage. None if that would need
        stages that a job cannot pin (`blocks`), if the schedule itself has all of it, and if it is inside backwards,
        which no pin can require.
        """
        named_pin = next((pin for pin in Recompute if self.recomputes(pin)), None)
        if self.recompute_inside or (named_pin is Recompute.NONE and self._imported_recompute_stages):
            return None
        return named_pin or (None if self.blocks is None else self.recompute)

    @property
    def head_text(self) -> str:
        """Text of the number of parts of the head, to follow the mesh; empty for a whole head."""
        return "" if self.head_parts == 1 else f", head in {self.head_parts} parts"

    @property
    def zero_text(self) -> str:
        """Text of the degree of ZeRO, to follow the mesh; empty if each replica has all of the optimizer state."""
        return f", ZeRO-{self.zero}" if self.zero else ""

    @property
    def slices_text(self) -> str:
        """Text of the lengths of slices in tokens."""
        remainder = f"; of the last micro-batch {slices_text(self.remainder_slices)}" if self.remainder else ""
        return slices_text(self.slices) + remainder

    def size_of(self, microbatch: int) -> int:
        """Sequences of the micro-batch with this number."""
        return self.remainder if self.is_remainder(microbatch) else self.microbatch

    def slices_of(self, microbatch: int) -> tuple[int, ...]:
        """Lengths in tokens of the slices of the micro-batch with this number."""
        return self.remainder_slices if self.is_remainder(microbatch) else self.slices

    def speed(self, step_seconds: float | None = None) -> Speed | None:
        """The speed of a step of ``step_seconds``, by default of the predicted one; None without duration."""
        prediction = self.prediction
        if step_seconds is None:
            step_seconds = prediction.step_seconds if prediction else 0.0
        return speed_of(
            self.model,
            num_sequences=self.global_batch,
            sequence_length=self.sequence_length,
            num_devices=self.num_ranks,
            step_seconds=step_seconds,
            peak_flops=prediction.peak_flops if prediction else None,
        )

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest form."""
        return digest(self.to_manifest())

    @property
    def for_ranks(self) -> Plan:
        """The plan in the form that ranks receive, with a digest of its own: without the fields in `confidence`.

        Ranks do not need those fields, and ranks of version 0.1.0, which may run during an upgrade, reject fields that
        they do not know. So new fields for people have to be added to `confidence` as well. ``late_receives`` is
        written only for CUDA, which 0.1.0 cannot run. ``remainder``, ``head_parts``, ``recompute``,
        ``recompute_ahead``, ``recompute_inside``, ``zero``, ``prefix_by_slice``, ``split_slots``, ``moment_type`` and
        ``gradient_reduction_type`` are written only if they are used; 0.1.0 rejects them.
        """
        alternatives = tuple(dataclasses.replace(alternative, speed=None) for alternative in self.alternatives)
        if self.prediction is None:
            return dataclasses.replace(self, alternatives=alternatives)
        prediction = dataclasses.replace(
            self.prediction,
            low_seconds=None,
            high_seconds=None,
            warnings=(),
            bubble=None,
            waiting=None,
            peak_flops=None,
            speed=None,
            explanation=None,
        )
        return dataclasses.replace(self, prediction=prediction, alternatives=alternatives)

    @property
    def confidence(self) -> dict[str, Any]:
        """The fields of prediction and alternatives that version 0.1.0 did not have, in manifest form."""
        written = self.prediction.to_manifest() if self.prediction else {}
        known = {name: written[name] for name in _CONFIDENCE if name in written}
        speeds = [
            None if alternative.speed is None else alternative.speed.to_manifest() for alternative in self.alternatives
        ]
        return {**known, _SPEEDS: speeds} if any(speeds) else known

    @classmethod
    def with_confidence(cls, for_ranks: Any, confidence: Any) -> Self:
        """The whole plan, from the manifest forms of both parts; raises `UserError` if they are invalid."""
        if not isinstance(for_ranks, Mapping) or not isinstance(confidence, Mapping):
            return cls.from_manifest(for_ranks)
        whole, added = dict(for_ranks), dict(confidence)
        speeds, alternatives = added.pop(_SPEEDS, None), whole.get("alternatives")
        if isinstance(whole.get("prediction"), Mapping):
            whole["prediction"] = {**whole["prediction"], **added}
        if isinstance(alternatives, list) and isinstance(speeds, list):
            whole["alternatives"] = [_with_speed(*pair) for pair in zip_longest(alternatives, speeds)]
        return cls.from_manifest(whole)


def _with_speed(alternative: Any, speed: Any) -> Any:
    """The manifest form of an alternative with its speed; other values are returned unchanged, to be rejected later."""
    return {**alternative, "speed": speed} if isinstance(alternative, Mapping) and speed is not None else alternative


_SPEEDS = "alternativeSpeeds"
_CONFIDENCE = ("lowSeconds", "highSeconds", "warnings", "bubble", "waiting", "peakFlops", "speed", "explanation")
