"""The numbering of a plan's ranks."""

from __future__ import annotations

from dataclasses import dataclass


def mesh_text(dp: int, tp: int, pp: int) -> str:
    """Text of degrees of parallelism: replicas x shards per rank x ranks of the pipeline."""
    return f"dp {dp} x tp {tp} x pp {pp}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The global ranks of a run: ``rank = (replica * pp + pipeline rank) * tp + shard``. Shards are adjacent.

    ``kv_copies`` adjacent shards hold copies of the same key/value heads.
    """

    dp: int
    tp: int = 1
    pp: int
    kv_copies: int = 1

    @property
    def text(self) -> str:
        """The degrees, for people."""
        return mesh_text(self.dp, self.tp, self.pp)

    @property
    def num_ranks(self) -> int:
        """Number of ranks: dp x tp x pp."""
        return self.dp * self.tp * self.pp

    def replica(self, rank: int) -> int:
        """The replica of ``rank``."""
        return rank // (self.pp * self.tp)

    def pipeline_rank(self, rank: int) -> int:
        """The position of ``rank`` in the pipeline of its replica."""
        return rank // self.tp % self.pp

    def shard(self, rank: int) -> int:
        """The shard of its pipeline rank that ``rank`` is."""
        return rank % self.tp

    def rank(self, replica: int, pipeline_rank: int, shard: int = 0) -> int:
        """The global rank of a shard."""
        return (replica * self.pp + pipeline_rank) * self.tp + shard

    def ranks(self, replica: int, pipeline_ranks: tuple[int, ...], shard: int = 0) -> tuple[int, ...]:
        """The global ranks of one shard of several pipeline ranks of one replica."""
        return tuple(self.rank(replica, pipeline_rank, shard) for pipeline_rank in pipeline_ranks)

    def peers(self, pipeline_rank: int, shard: int = 0) -> tuple[int, ...]:
        """The global ranks that hold the same parts of the same stages, one per replica."""
        return tuple(self.rank(replica, pipeline_rank, shard) for replica in range(self.dp))

    def shards(self, replica: int, pipeline_rank: int) -> tuple[int, ...]:
        """The global ranks of all shards of a pipeline rank."""
        return tuple(self.rank(replica, pipeline_rank, shard) for shard in range(self.tp))

    def copies(self, rank: int) -> tuple[int, ...]:
        """The global ranks among the shards of ``rank`` that hold the same key/value heads."""
        first = rank - self.shard(rank) % self.kv_copies
        return tuple(range(first, first + self.kv_copies))
