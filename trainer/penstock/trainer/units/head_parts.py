"""Parts of a divided head that one stage has: final norm, logits and loss as a chain of units (ADR 0042).

A part has the matrix W of some rows of the vocabulary. For the logits of a token in these rows, let M be the maximum, Z
the sum of exp(logit - M), and P the softmax over these rows alone. F receives m and z of all earlier rows and their
addend A, the softmax over the earlier rows times their matrix. It passes on

    m' = max(m, M),    z' = z exp(m - m') + Z exp(M - m'),    A' = (z exp(m - m') / z') A + (Z exp(M - m') / z') P W

and the target's logit y. This is FlashAttention's rule for blocks of keys (arXiv 2205.14135, section 3.1). After the
last part, m, z and y cover the whole vocabulary. They give the loss log z + (m - y) and, with A, the gradient of the
norm's output.

m and z are passed on separately. The log-sum-exp m + log z is rounded relative to m: for logits near 700, fp32 makes it
wrong by 3e-5, and every softmax that uses it as well.

P leaves out the target's own row. The coefficient of that row is exp(y - m) / z - 1. For a well predicted token it is
small while its softmax is not, and sums in a narrow type would lose most of the difference. The stage that has the row
adds it once m and z are known: the stage of the last part in F, others in I, which passes m, z and y on along with the
gradient. W multiplies P, as F left it, by Z exp(M - m) / z. It needs nothing from other parts and runs at any time
after I.

Each of several shards has some rows of every part. M, Z and P are those of the shard's rows; m, z and y cover the rows
of all shards. Adjacent parts in one stage act as one part.

Shape letters: B sequences, N tokens of the slice, T = B N, C tokens of one chunk, H hidden, V rows of the vocabulary
that the shard has of a part, S shards; P, R and U as in `penstock.trainer.units.division`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from penstock.core.layout import HEAD_CHUNK_TOKENS, NUM_OWN_STATISTICS, NUM_STATISTICS, Operation, Operations, SlotKind
from penstock.core.model import Family, ModelSpec, Unit
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.collectives import Gather, Pass
from penstock.trainer.units.cross_entropy import Scale, softmax_without_targets
from penstock.trainer.units.division import Division, vocabulary_parts
from penstock.trainer.units.linear import accumulate_product
from penstock.trainer.units.norm import build_norm
from penstock.trainer.units.views import SlotViews
from penstock.trainer.units.workspace import Workspace

_HIGHEST, _SUM, _TARGET = range(NUM_STATISTICS)


class HeadParts:
    """Adjacent parts of a divided head. Every method is a pass over one slice.

    ``x`` is the hidden state before the first part of the head. Later parts read the stage's input slot instead.
    """

    def __init__(
        self,
        spec: ModelSpec,
        units: Sequence[Unit],
        parameters: StageParameters,
        division: Division,
        workspace: Workspace,
    ) -> None:
        self.has_first, self.has_last = units[0].part == 0, units[-1].part == spec.head_parts - 1
        self.rows = spec.rows_of(units[0].index, units[-1].index + 1)
        self._parts = {unit.index: _Part(spec, unit, parameters, division) for unit in units}
        self._norm = build_norm(spec, parameters, "head.norm", workspace) if self.has_first else None
        self._norm_statistics = ("rstd", "mean") if spec.family is Family.GPT2 else ("rstd",)
        self._wide = parameters.gradient_flat.dtype
        self._division, self._workspace = division, workspace
        self._first, self._last = units[0].index, units[-1].index

    def forward(self, views: SlotViews, x_RH: Tensor | None, labels_BN: Tensor, scale: Scale) -> Pass[Tensor | None]:
        """F: fill the buffers that the parts keep, and ``y``.

        With the last part, fill ``h`` with the gradient of ``scale`` times the summed loss instead of ``y``, and return
        the summed loss, a scalar. It is zero on all shards but the first, so that a sum over ranks counts it once.
        """
        labels_T, division = labels_BN.reshape(-1), self._division
        num_tokens = len(labels_T)
        normed_TH = yield from self._normed(views, x_RH, num_tokens)
        passed_on = self._passed_on(views)
        sum_RH, statistics_3T = passed_on["dnormed" if self.has_last else "addend"], passed_on["statistics"]
        before_3T = self._begin(views, statistics_3T)
        addend_PH = division.take(num_tokens, normed_TH.shape[1], normed_TH.dtype)
        addend_TH = division.without_padding(addend_PH, num_tokens)
        yield from self._advance(views, normed_TH, labels_T, statistics_3T, addend_TH)
        total_UH = yield from division.summed(addend_PH, sum_RH, num_tokens)
        sum_UH, own = division.own(sum_RH, num_tokens), self._own_tokens(num_tokens)
        if not self.has_first:
            earlier_UH = division.own(views[SlotKind.INPUT][self._first]["addend"], num_tokens)
            share_U = _share(before_3T[:, own], statistics_3T[:, own])
            torch.addcmul(total_UH, earlier_UH, share_U[:, None], out=sum_UH)
        elif total_UH is not sum_UH:
            sum_UH.copy_(total_UH)
        if not self.has_last:
            return None
        sum_UH.mul_(_valid(labels_T[own], self._wide).mul_(scale)[:, None])
        return self._summed_loss(statistics_3T, labels_T)

    def loss(self, views: SlotViews, x_RH: Tensor | None, labels_BN: Tensor) -> Pass[Tensor | None]:
        """The summed loss without gradients, as F returns it. Passes on statistics but no addend."""
        labels_T = labels_BN.reshape(-1)
        normed_TH = yield from self._normed(views, x_RH, len(labels_T))
        if self.has_last:
            statistics_3T = self._workspace.take(NUM_STATISTICS, len(labels_T), dtype=self._wide)
        else:
            statistics_3T = self._passed_on(views)["statistics"]
        self._begin(views, statistics_3T)
        yield from self._advance(views, normed_TH, labels_T, statistics_3T, None)
        return self._summed_loss(statistics_3T, labels_T) if self.has_last else None

    def logits_at(self, views: SlotViews, x_RH: Tensor | None, row: int) -> Pass[Tensor]:
        """Logits of the parts' rows for the token after row ``row`` of the slice, in the accumulate type. Every shard
        returns them.
        """
        num_tokens = views[SlotKind.LINEAR_INPUTS][self._first]["own_statistics"].shape[1]
        normed_TH = yield from self._normed(views, x_RH, num_tokens)
        logits_V = normed_TH.new_empty(0, dtype=self._wide)
        for part in self._parts.values():
            logits_V = torch.cat([logits_V, (yield from part.logits(normed_TH[row], self._wide))])
        return logits_V

    def recompute(
        self, views: SlotViews, x_RH: Tensor | None, labels_BN: Tensor, operations: Mapping[int, Operations]
    ) -> Pass[None]:
        """R: run ``operations`` of the parts again. The call with the stage's first part has to come first."""
        labels_T = labels_BN.reshape(-1)
        makes_normed = Operation.NORM if self.has_first else Operation.PROJECT
        if makes_normed in operations.get(self._first, ()):
            self._keep_normed(views, x_RH, len(labels_T))
        remade = {index: part for index, part in self._parts.items() if Operation.ACTIVATE in operations.get(index, ())}
        if not remade:
            return
        normed_TH = yield from self._kept_normed(views, len(labels_T))
        for chunk, wide in self._chunks(normed_TH):
            for index, part in remade.items():
                part.project(views[SlotKind.LINEAR_INPUTS][index], normed_TH, labels_T, chunk, wide)

    def backward_input(
        self, views: SlotViews, x_RH: Tensor | None, labels_BN: Tensor, scale: Scale, dx_RH: Tensor | None
    ) -> Pass[None]:
        """I: from ``g_in`` (last part: from ``h``), write the gradient of x to ``dx``, or ``g_out`` without the first
        part. Keeps the statistics for W.
        """
        received = views[SlotKind.HEAD_GRADIENT if self.has_last else SlotKind.RECEIVED_GRADIENT][self._last]
        statistics_3T, labels_T, division = received["statistics"], labels_BN.reshape(-1), self._division
        views[SlotKind.OUTPUT_GRADIENTS][self._first]["statistics"].copy_(statistics_3T)
        num_tokens = len(labels_T)
        self._workspace.reset()
        dnormed_UH = division.own(received["dnormed"], num_tokens)
        if not self.has_last:
            targets_UH = yield from self._target_rows(received["dnormed"], statistics_3T, labels_T, scale)
            dnormed_UH = targets_UH.add_(dnormed_UH)
        if not self.has_first:
            sent = views[SlotKind.SENT_GRADIENT][self._first]
            division.own(sent["dnormed"], num_tokens).copy_(dnormed_UH)
            sent["statistics"].copy_(statistics_3T)
        elif len(dnormed_UH):
            assert self._norm is not None
            x_UH, dx_UH = (division.own(_needed(tensor), num_tokens) for tensor in (x_RH, dx_RH))
            self._norm.backward(dnormed_UH, x_UH, self._statistics(views, num_tokens), None, dx_UH)

    def backward_weight(self, views: SlotViews, labels_BN: Tensor, scale: Scale) -> Pass[None]:
        """W: add the gradients of the parts' matrices."""
        labels_T = labels_BN.reshape(-1)
        normed_TH = yield from self._kept_normed(views, len(labels_T))
        statistics_3T = views[SlotKind.OUTPUT_GRADIENTS][self._first]["statistics"]
        scale_T = _valid(labels_T, self._wide).mul_(scale)
        target_T = _target_coefficients(statistics_3T, labels_T).mul_(scale)
        scaled_CH, rows_CH = self._take_rows(normed_TH), self._take_rows(normed_TH, self._wide)
        for chunk in _chunks(len(labels_T)):
            normed_CH, labels_C = normed_TH[chunk], labels_T[chunk]
            scaled_CH, rows_CH = scaled_CH[: len(labels_C)], rows_CH[: len(labels_C)]
            for index, part in self._parts.items():
                kept = views[SlotKind.LINEAR_INPUTS][index]
                share_C = _share(kept["own_statistics"][:, chunk], statistics_3T[:, chunk]).mul_(scale_T[chunk])
                torch.mul(normed_CH, share_C[:, None], out=scaled_CH)
                accumulate_product(part.gradient_VH, part.probabilities(kept)[chunk], scaled_CH)
                coefficient_C = target_T[chunk] * part.vocabulary.holds(labels_C)
                torch.mul(normed_CH, coefficient_C[:, None], out=rows_CH)
                part.gradient_VH.index_add_(0, part.vocabulary.rows(labels_C), rows_CH)

    def _normed(self, views: SlotViews, x_RH: Tensor | None, num_tokens: int) -> Pass[Tensor]:
        """Keep the norm's output and pass it on. Returns that of all tokens [T, H]."""
        normed_RH = self._keep_normed(views, x_RH, num_tokens)
        if SlotKind.OUTPUT in views and not self.has_last:
            self._passed_on(views)["normed"].copy_(normed_RH)
        return (yield from self._kept_normed(views, num_tokens))

    def _keep_normed(self, views: SlotViews, x_RH: Tensor | None, num_tokens: int) -> Tensor:
        """The norm's output for the rows that the shard holds, computed or received from the previous stage."""
        normed_RH = views[SlotKind.LINEAR_INPUTS][self._first]["normed"]
        if self._norm is None:
            normed_RH.copy_(views[SlotKind.INPUT][self._first]["normed"])
        else:
            x_UH = self._division.own(_needed(x_RH), num_tokens)
            if len(x_UH):
                statistics = self._statistics(views, num_tokens)
                self._norm.forward(x_UH, statistics, self._division.own(normed_RH, num_tokens))
        return normed_RH

    def _kept_normed(self, views: SlotViews, num_tokens: int) -> Pass[Tensor]:
        """The norm's output for all tokens, gathered from the rows that the shards keep."""
        self._workspace.reset()
        normed_RH = views[SlotKind.LINEAR_INPUTS][self._first]["normed"]
        return (yield from self._division.all_tokens(normed_RH, num_tokens))

    def _statistics(self, views: SlotViews, num_tokens: int) -> Mapping[str, Tensor]:
        """Statistics of the norm for the tokens that the shard holds."""
        kept = views[SlotKind.ACTIVATIONS][self._first]
        return {name: self._division.own(kept[name], num_tokens) for name in self._norm_statistics}

    def _passed_on(self, views: SlotViews) -> Mapping[str, Tensor]:
        return views[SlotKind.HEAD_GRADIENT if self.has_last else SlotKind.OUTPUT][self._last]

    def _begin(self, views: SlotViews, statistics_3T: Tensor) -> Tensor:
        """Set the statistics to those of all earlier rows. Returns a copy of them."""
        if self.has_first:
            _clear(statistics_3T)
        else:
            statistics_3T.copy_(views[SlotKind.INPUT][self._first]["statistics"])
        return statistics_3T.clone()

    def _advance(
        self,
        views: SlotViews,
        normed_TH: Tensor,
        labels_T: Tensor,
        statistics_3T: Tensor,
        addend_TH: Tensor | None,
    ) -> Pass[None]:
        """Include the parts' rows in the statistics, and write the shard's share of their addend to ``addend``.

        With the last part the addend includes the rows of the targets.
        """
        rows_CH = None if addend_TH is None else self._take_rows(normed_TH)
        shared_S3C = self._take_shared(len(labels_T))
        for chunk, wide in self._chunks(normed_TH):
            own_3C, addend_CH = self._own_rows(views, normed_TH, labels_T, chunk, wide, addend_TH, rows_CH)
            total_3C = yield from self._over_shards(own_3C, shared_S3C)
            _take_in(statistics_3T[:, chunk], total_3C)
            if addend_CH is None or rows_CH is None:
                continue
            addend_CH.mul_(_share(own_3C, statistics_3T[:, chunk])[:, None])
            if self.has_last:
                coefficient_C = _target_coefficients(statistics_3T[:, chunk], labels_T[chunk])
                self._add_target_rows(addend_CH, labels_T[chunk], coefficient_C, rows_CH)

    def _own_rows(
        self,
        views: SlotViews,
        normed_TH: Tensor,
        labels_T: Tensor,
        chunk: slice,
        wide: Tensor | None,
        addend_TH: Tensor | None,
        rows_CH: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The statistics [3, C] and the addend [C, H] of the shard's own rows of all parts."""
        own_3C = _clear(labels_T.new_empty(NUM_STATISTICS, chunk.stop - chunk.start, dtype=self._wide))
        addend_CH = None if addend_TH is None else addend_TH[chunk]
        for number, (index, part) in enumerate(self._parts.items()):
            kept = views[SlotKind.LINEAR_INPUTS][index]
            part_3C, probabilities_CV = part.project(kept, normed_TH, labels_T, chunk, wide)
            before_3C = own_3C.clone()
            _take_in(own_3C, part_3C)
            if addend_CH is None or rows_CH is None:
                continue
            if number == 0:
                torch.mm(probabilities_CV, part.weight_VH, out=addend_CH)
                continue
            product_CH = torch.mm(probabilities_CV, part.weight_VH, out=rows_CH[: len(addend_CH)])
            addend_CH.mul_(_share(before_3C, own_3C)[:, None])
            addend_CH.addcmul_(product_CH, _share(part_3C, own_3C)[:, None])
        return own_3C, addend_CH

    def _over_shards(self, own_3C: Tensor, shared_S3C: Tensor | None) -> Pass[Tensor]:
        """The statistics over the rows of all shards."""
        if shared_S3C is None:
            return own_3C
        shape = (shared_S3C.shape[0], *own_3C.shape)
        some_S3C = shared_S3C.view(-1)[: shape[0] * own_3C.numel()].view(shape)
        some_S3C[self._division.shard].copy_(own_3C)
        yield Gather(some_S3C.flatten(0, 1))
        highest_SC, sum_SC, target_SC = some_S3C.unbind(1)
        highest_C = highest_SC.amax(0)
        return torch.stack([highest_C, (highest_SC - highest_C).exp_().mul_(sum_SC).sum(0), target_SC.sum(0)])

    def _target_rows(self, like_RH: Tensor, statistics_3T: Tensor, labels_T: Tensor, scale: Scale) -> Pass[Tensor]:
        """The rows [U, H] of the targets that these parts have, times their coefficients, in the workspace."""
        division, num_tokens = self._division, len(labels_T)
        rows_PH = division.take(num_tokens, like_RH.shape[1], like_RH.dtype).zero_()
        rows_TH = division.without_padding(rows_PH, num_tokens)
        coefficient_T = _target_coefficients(statistics_3T, labels_T).mul_(scale)
        rows_CH = self._take_rows(rows_TH)
        for chunk in _chunks(num_tokens):
            self._add_target_rows(rows_TH[chunk], labels_T[chunk], coefficient_T[chunk], rows_CH)
        sum_RH = self._workspace.take(*like_RH.shape, dtype=like_RH.dtype) if division.by_tokens else like_RH
        return (yield from division.summed(rows_PH, sum_RH, num_tokens))

    def _add_target_rows(self, out_CH: Tensor, labels_C: Tensor, coefficient_C: Tensor, rows_CH: Tensor) -> None:
        """Add the row of each target that the shard has, times its coefficient."""
        for part in self._parts.values():
            rows = torch.index_select(part.weight_VH, 0, part.vocabulary.rows(labels_C), out=rows_CH[: len(labels_C)])
            out_CH.addcmul_(rows, (coefficient_C * part.vocabulary.holds(labels_C))[:, None])

    def _chunks(self, normed_TH: Tensor) -> Iterator[tuple[slice, Tensor | None]]:
        """Ranges of tokens, with memory for logits in the accumulate type, or None if that is the compute type."""
        num_tokens = len(normed_TH)
        wide = None
        if normed_TH.dtype != self._wide:
            largest = max(part.largest for part in self._parts.values())
            wide = self._workspace.take(min(HEAD_CHUNK_TOKENS, num_tokens) * largest, dtype=self._wide)
        for chunk in _chunks(num_tokens):
            yield chunk, wide

    def _take_rows(self, normed_TH: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a chunk of rows, by default in the type of ``normed``."""
        rows = min(HEAD_CHUNK_TOKENS, len(normed_TH))
        return self._workspace.take(rows, normed_TH.shape[1], dtype=dtype or normed_TH.dtype)

    def _take_shared(self, num_tokens: int) -> Tensor | None:
        """Memory for the numbers that shards exchange for a chunk; None if there is one shard."""
        if self._division.is_alone:
            return None
        shape = (self._division.sharding.tp, NUM_STATISTICS, min(HEAD_CHUNK_TOKENS, num_tokens))
        return self._workspace.take(*shape, dtype=self._wide)

    def _own_tokens(self, num_tokens: int) -> slice:
        own = self._division.own_tokens(num_tokens)
        return slice(own.start, own.stop)

    def _summed_loss(self, statistics_3T: Tensor, labels_T: Tensor) -> Tensor:
        """The summed loss of valid labels on the first shard, zero on the others."""
        losses_T = statistics_3T[_SUM].log().add_(statistics_3T[_HIGHEST] - statistics_3T[_TARGET])
        loss = losses_T.masked_fill_(labels_T < 0, 0.0).sum()
        return loss if self._division.shard == 0 else torch.zeros_like(loss)


class _Part:
    """Matrix of one part. The shard has the rows ``vocabulary``, and no shard has more than ``largest`` rows."""

    def __init__(self, spec: ModelSpec, unit: Unit, parameters: StageParameters, division: Division) -> None:
        name, rows, tp = (
            "embedding.weight" if spec.tied else "head.weight",
            spec.part_rows(unit.part),
            division.sharding.tp,
        )
        matrix = parameters.declared[name]
        place = matrix.place_of(rows, tp, division.shard)
        self.weight_VH, self.gradient_VH = parameters.compute[name][place], parameters.gradients[name][place]
        self._vocabularies = vocabulary_parts(matrix, tp, rows)
        self.vocabulary = self._vocabularies[division.shard]
        self.largest = -(-len(rows) // tp)
        self._division = division

    def probabilities(self, kept: Mapping[str, Tensor]) -> Tensor:
        """Buffer of the softmax, cut to the shard's columns. Its memory has the size that the largest shard needs."""
        memory = kept["probabilities"]
        return memory.view(-1)[: len(memory) * self.vocabulary.size].view(len(memory), self.vocabulary.size)

    def project(
        self, kept: Mapping[str, Tensor], normed_TH: Tensor, labels_T: Tensor, chunk: slice, wide: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Compute and keep M, Z and P of a chunk. Returns M, Z and the target's logit, zero if the shard lacks it, and
        P [C, V] without the targets.

        A forward whose activations are recomputed has memory for P of only one chunk.
        """
        kept_V = self.probabilities(kept)
        narrow_CV = kept_V[chunk] if len(kept_V) == len(normed_TH) else kept_V[: chunk.stop - chunk.start]
        torch.mm(normed_TH[chunk], self.weight_VH.t(), out=narrow_CV)
        wide_CV = narrow_CV
        if wide is not None:
            wide_CV = wide[: narrow_CV.numel()].view(narrow_CV.shape).copy_(narrow_CV)
        labels_C = labels_T[chunk]
        index_C1, is_own_C = self.vocabulary.rows(labels_C)[:, None], self.vocabulary.holds(labels_C)
        own_3C = torch.stack(softmax_without_targets(wide_CV, index_C1, is_own_C))
        if wide is not None:
            narrow_CV.copy_(wide_CV)
        kept["own_statistics"][:, chunk].copy_(own_3C[:NUM_OWN_STATISTICS])
        return own_3C, narrow_CV

    def logits(self, normed_H: Tensor, wide: torch.dtype) -> Pass[Tensor]:
        """Logits of the part's rows of all shards."""
        own_V = torch.mv(self.weight_VH, normed_H).to(wide)
        if self._division.is_alone:
            return own_V
        logits_SV = own_V.new_zeros(len(self._vocabularies), self.largest)
        logits_SV[self._division.shard, : len(own_V)] = own_V
        yield Gather(logits_SV)
        return torch.cat([row_V[: shard.size] for row_V, shard in zip(logits_SV, self._vocabularies, strict=True)])


def _chunks(num_tokens: int) -> Iterator[slice]:
    for start in range(0, num_tokens, HEAD_CHUNK_TOKENS):
        yield slice(start, min(start + HEAD_CHUNK_TOKENS, num_tokens))


def _valid(labels_T: Tensor, dtype: torch.dtype) -> Tensor:
    return (labels_T >= 0).to(dtype)


def _clear(statistics_3C: Tensor) -> Tensor:
    """Set the statistics to those of an empty set of rows."""
    statistics_3C[_HIGHEST].fill_(-torch.inf)
    statistics_3C[_SUM:].zero_()
    return statistics_3C


def _take_in(statistics_3C: Tensor, more_3C: Tensor) -> None:
    """Extend the statistics of some rows by those of ``more`` rows, in place."""
    before_C = statistics_3C[_HIGHEST].clone()
    highest_C = torch.maximum(before_C, more_3C[_HIGHEST], out=statistics_3C[_HIGHEST])
    more_C = (more_3C[_HIGHEST] - highest_C).exp_().mul_(more_3C[_SUM])
    statistics_3C[_SUM].mul_(before_C.sub_(highest_C).exp_()).add_(more_C)
    statistics_3C[_TARGET].add_(more_3C[_TARGET])


def _share(some_3C: Tensor, all_3C: Tensor) -> Tensor:
    """Z exp(M - m) / z: the share of some rows in the softmax over all rows."""
    return (some_3C[_HIGHEST] - all_3C[_HIGHEST]).exp_().mul_(some_3C[_SUM]).div_(all_3C[_SUM])


def _target_coefficients(statistics_3T: Tensor, labels_T: Tensor) -> Tensor:
    """exp(y - m) / z - 1, and zero for ignored labels: these have no y, and exp(-m) may be infinite."""
    ahead_T = (statistics_3T[_TARGET] - statistics_3T[_HIGHEST]).sub_(statistics_3T[_SUM].log())
    return ahead_T.masked_fill_(labels_T < 0, 0.0).expm1_()


def _needed(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the first part needs x and a place for its gradient"
    return tensor
