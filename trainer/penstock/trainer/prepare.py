"""Prepares a job's data once in a cache, and records its folder in the run directory."""

from __future__ import annotations

from pathlib import Path

from penstock.core import jsontext
from penstock.core.errors import UserError
from penstock.core.host.cache import cache_folder
from penstock.core.job import PipelineJob
from penstock.core.preparing import SILENT, Reporter
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.trainer.data.batches import TrainingBatches, ValidationBatches, Windows
from penstock.trainer.data.prepare import prepare
from penstock.trainer.data.prepared import Prepared, open_prepared


def prepare_data(job: PipelineJob, run: RunDir, reporter: Reporter = SILENT, *, cache: Path | None = None) -> Prepared:
    """Tokenise the job's data, or reuse the cached result. Raises `UserError` if the data does not fit the job.

    The result is kept in ``cache``, by default in the user's cache folder.
    """
    prepared = prepare(job.spec.data, cache or cache_folder() / "data", reporter=reporter)
    training_batches(job, prepared)
    validation_batches(job, prepared, limit=1)
    write_json(run.data, {"folder": str(prepared.folder)})
    return prepared


def open_data(run: RunDir) -> Prepared:
    """Open the data that `prepare_data` prepared for this run."""
    try:
        return open_prepared(Path(jsontext.load(run.data.read_text())["folder"]))
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(what="has no prepared data", where=str(run.root), remedy="run the job again") from None


def training_batches(job: PipelineJob, prepared: Prepared) -> TrainingBatches:
    """The training samples, in the order that the seed determines."""
    length, vocab = job.spec.data.sequence_length, job.spec.model.vocab
    windows = Windows(tokens=prepared.train, sequence_length=length, vocab=vocab)
    return TrainingBatches(windows=windows, global_batch=job.spec.training.global_batch, seed=job.spec.training.seed)


def validation_batches(job: PipelineJob, prepared: Prepared, limit: int) -> ValidationBatches:
    """At most ``limit`` windows of the validation tokens, evenly spaced."""
    length, vocab = job.spec.data.sequence_length, job.spec.model.vocab
    windows = Windows(tokens=prepared.validation, sequence_length=length, vocab=vocab)
    return ValidationBatches(windows=windows, limit=limit)
