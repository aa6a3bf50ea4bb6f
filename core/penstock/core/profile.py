"""Profile: costs of units, links, reductions and memory, measured on real hardware, with age, method and spread.

(The module shares its name with one of Python's, which is harmless inside a package.)
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

from penstock.core.errors import UserError
from penstock.core.layout import Precision
from penstock.core.manifest import Manifest
from penstock.core.model import UnitKind
from penstock.core.moments import MomentType
from penstock.core.replicas import ReductionType
from penstock.core.schedule import Kind
from penstock.core.sharding import Collective

MOST_BYTES_PER_SECOND = 1e13
"""No link is as fast: the memory of today's fastest devices is slower."""

BUSY_SHARE = 0.75
"""Share of a machine's cores. If the load average before the measurement was higher, other programs took time of the
cores.
"""

_REMEDY = "measure again when nothing else runs: penstock profile JOB"


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineKey(Manifest):
    """Machines and software for which a measurement is valid.

    ``host`` names the machine, or several in the order of their ranks. The other fields are those of the first rank.
    ``trainer`` is a digest of the trainer's code, which was timed. Older profiles lack it.
    """

    host: str
    device: str
    num_cores: int
    memory_bytes: int
    threads_per_rank: int
    torch_version: str
    backend: str
    trainer: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRecord(Manifest):
    """Seconds of one unit's F, I, W or R over a (micro-batch, slice length, prefix) point.

    R runs the unit's operations without products (`penstock.core.remaking.SELECTIVE`). Older profiles have none.

    ``alone_seconds`` is measured with the other ranks idle, ``together_seconds`` with all ranks computing. Each is a
    mean without the slowest twentieth. ``samples`` counts the runs alone; together every rank made as many. ``spread``
    is the interquartile range of the runs alone over their mean, ``together_spread`` that of the others, which older
    profiles lack. ``held_out`` points test the fit and are not used for it. ``host_seconds`` is the time in which the
    host of a CUDA device launches the pass kernel by kernel, which no graph of the action needs
    (`penstock.core.graphs`). Older profiles lack it for one shard.

    With ``tp`` shards it is the pass of one shard, with its collectives, and alone means that only these shards
    compute. For a head that is divided into ``head_parts`` units it is the pass of one of them
    (`penstock.core.model.DividedModel`).
    """

    unit: UnitKind
    kind: Kind
    batch: int
    length: int
    prefix: int
    alone_seconds: float
    together_seconds: float
    spread: float
    samples: int
    held_out: bool = False
    together_spread: float | None = None
    host_seconds: float | None = None
    tp: int = 1
    head_parts: int = 1

    def seconds(self, *, together: bool) -> float:
        """Seconds of the pass on the device, with the other ranks idle or computing."""
        return self.together_seconds if together else self.alone_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRecord(Manifest):
    """One directed channel fitted to latency + bytes / bandwidth, with the fit's mean absolute relative error.

    The latency is half a round trip of the smallest message, so both directions have the same one. The bandwidth is
    measured in each direction, with messages that follow each other without a pause. A hundred ranks have ten thousand
    such records, and a ConfigMap has at most one mebibyte, so the measured times are not kept. Older profiles have
    them, as ``sizes_bytes`` and ``seconds``.

    A link is ``bounded`` if no line could be fitted after several measurements, since times did not grow with size.
    Then the bandwidth is that of the largest messages, with their latency, and the error is their spread.
    """

    source: int
    target: int
    latency_seconds: float
    bytes_per_second: float
    error: float
    sizes_bytes: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    bounded: bool = False

    @property
    def is_physical(self) -> bool:
        """Whether a link can be like this; a fit to noise may say that bytes take no time."""
        return 0 <= self.latency_seconds < math.inf and 0 < self.bytes_per_second <= MOST_BYTES_PER_SECOND


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveRecord(Manifest):
    """Seconds of a collective over ``num_ranks`` ranks, all active: by default an all-reduce.

    Each rank has ``num_bytes`` to sum, to scatter the sum of, or when all are gathered. Older profiles have sums alone.
    If sums travel in another ``reduction_type``, ``num_bytes`` are those of fp32, and conversions count as time.
    """

    num_ranks: int
    num_bytes: int
    seconds: float
    spread: float
    collective: Collective = Collective.SUM
    reduction_type: ReductionType = ReductionType.FP32


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRecord(Manifest):
    """Seconds of clipping and one optimizer step over ``num_parameters`` elements, all ranks active."""

    num_parameters: int
    seconds: float
    spread: float
    moment_type: MomentType = MomentType.FP32


@dataclass(frozen=True, kw_only=True, slots=True)
class TransientRecord(Manifest):
    """Bytes that one of ``tp`` shards of a unit's F, I or W takes, beyond its slots or as a CUDA graph, at a
    (micro-batch, length, prefix) point; of one of ``head_parts`` units of a head that is divided.
    """

    unit: UnitKind
    kind: Kind
    batch: int
    length: int
    prefix: int
    num_bytes: int
    tp: int = 1
    head_parts: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRecord(Manifest):
    """``constant_bytes`` is a rank's process with groups made and libraries warm, before any parameter, and on CUDA
    ``most_graph_bytes`` (`penstock.core.graphs`). ``graphs`` has the bytes of the graph of a pass, in addition to the
    pool. Older profiles lack both, and count every action of one shard as recorded.
    """

    constant_bytes: int
    transients: tuple[TransientRecord, ...] = ()
    graphs: tuple[TransientRecord, ...] = ()
    most_graph_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile(Manifest):
    """All measurements of one model's units on one machine, or on several together.

    ``model_digest`` names the dimensions that costs depend on; ``measured_at`` is seconds since the epoch; ``load`` the
    load average before the measurement; ``method`` how it was measured. ``hosts`` numbers the machine of every rank
    from 0, by first appearance; empty means one machine for all. A rank slows down only ranks of its own machine.
    ``sequence_parallel`` says how shards divided hidden states, and ``only_tp`` which degree of tensor parallelism
    alone was measured, because the job pinned it; none: all that plans may have. ``units`` has the times of a
    rank that is as fast as the first. ``slowness`` is the time of each rank's passes, divided by that of the first
    rank; empty if all took about equally long.
    """

    key: MachineKey
    model_digest: str
    precision: Precision
    measured_at: float
    num_ranks: int
    units: tuple[UnitRecord, ...]
    links: tuple[LinkRecord, ...]
    collectives: tuple[CollectiveRecord, ...]
    optimizer: tuple[OptimizerRecord, ...]
    memory: MemoryRecord
    action_overhead_seconds: float
    load: float = 0.0
    method: str = ""
    hosts: tuple[int, ...] = ()
    sequence_parallel: bool = True
    only_tp: int | None = None
    slowness: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.hosts and len(self.hosts) != self.num_ranks:
            what = f"names the machines of {len(self.hosts)} ranks of {self.num_ranks}"
            raise UserError(what=what, where="hosts", remedy="measure again")
        is_positive = all(0 < value < math.inf for value in self.slowness)
        if self.slowness and not (is_positive and len(self.slowness) == self.num_ranks):
            what = f"does not have one positive number for each of {self.num_ranks} ranks"
            raise UserError(what=what, where="slowness", remedy="measure again")

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """The degrees of tensor parallelism at which units were measured, ascending."""
        return tuple(sorted({record.tp for record in self.units}))

    @property
    def degrees(self) -> tuple[tuple[int, int], ...]:
        """The degrees of tensor parallelism, each with the numbers of parts that the head was divided into there."""
        return tuple(sorted({(record.tp, record.head_parts) for record in self.units}))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why predictions from this profile may be further off than its spreads say, each with a remedy."""
        warnings = []
        if self.load > BUSY_SHARE * self.key.num_cores:
            cores = "1 core" if self.key.num_cores == 1 else f"{self.key.num_cores} cores"
            warnings.append(
                f"the machine was busy before it was measured (load average {self.load:.1f} on {cores}), so predicted "
                f"times may be too long or too short; {_REMEDY}"
            )
        bounded = [link.error for link in self.links if link.bounded]
        if bounded:
            warnings.append(
                f"{len(bounded)} of {len(self.links)} links could not be fitted: the times of their messages spread by "
                f"{max(bounded):.0%} and did not grow with size, so their bandwidth is only a lower bound; {_REMEDY}"
            )
        return tuple(warnings)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest form."""
        return digest(self.to_manifest())


def digest(manifest: object) -> str:
    """SHA-256 of plain data in canonical JSON."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
