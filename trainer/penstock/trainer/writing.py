"""Generates text from a run's newest checkpoint, and exports its weights for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import UserError
from penstock.core.manifest import Manifest
from penstock.core.model import Family
from penstock.core.run.folder import RunDir
from penstock.trainer.checkpoint import Checkpoint, find_checkpoints, read_weights
from penstock.trainer.export import export
from penstock.trainer.generate import Generator
from penstock.trainer.prepare import open_data


@dataclass(frozen=True, kw_only=True, slots=True)
class Written(Manifest):
    """Generated ``text``, which begins with ``prompt``, from the model after ``step`` steps."""

    prompt: str
    text: str
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported(Manifest):
    """Path of the folder that was written, and the number of steps that the model had taken."""

    folder: str
    step: int


def newest(run: RunDir, *, attempt: int | None = None, step: int | None = None) -> Checkpoint:
    """The newest complete checkpoint, of ``attempt`` and ``step`` if given. Raises `UserError` if there is none."""
    place, checkpoints = f"run directory {run.root}", find_checkpoints(run.checkpoints)
    if not checkpoints:
        raise UserError(what="has no checkpoint yet", where=place, remedy="train it first: penstock run JOB")
    candidates = [
        checkpoint
        for checkpoint in checkpoints
        if attempt in (None, checkpoint.attempt) and step in (None, checkpoint.step)
    ]
    if not candidates:
        choices = ", ".join(f"attempt {checkpoint.attempt} step {checkpoint.step}" for checkpoint in checkpoints)
        raise UserError(what="has no such checkpoint", where=place, remedy=f"choose one of these: {choices}")
    return candidates[0]


def continued(run: RunDir, prompt: str, *, tokens: int, temperature: float, seed: int) -> Written:
    """Continue ``prompt`` by up to ``tokens`` tokens. Raises `UserError` without a checkpoint or a tokenizer."""
    spec, checkpoint = run.read_recorded_job().spec.model, newest(run)
    tokenizer = open_data(run).tokenizer
    if tokenizer is None:
        raise UserError(
            what="the data came as tokens without a tokenizer",
            where="spec.data.tokenizer",
            remedy="name the tokenizer.json that the tokens were made with, and run again",
        )
    ids = [int(token) for token in next(tokenizer.encode([prompt]))] or [tokenizer.separator]
    length = len(ids) + tokens
    if spec.family is Family.GPT2:
        length = min(length, spec.positions)
    generator = Generator(spec, read_weights(checkpoint.folder), length)
    added = list(generator.continue_from(ids, temperature=temperature, seed=seed))
    return Written(prompt=prompt, text=prompt + tokenizer.decode(added), step=checkpoint.step)


def exported(run: RunDir, folder: Path, *, attempt: int | None = None, step: int | None = None) -> Exported:
    """Write the newest checkpoint, of ``attempt`` and ``step`` if given, to ``folder``.

    The folder has the format of transformers. It includes the tokenizer if that has a file.

    Raises:
        UserError: there is no checkpoint, it is corrupt, or the folder cannot be written.
    """
    checkpoint = newest(run, attempt=attempt, step=step)
    export(checkpoint.folder, folder, open_data(run).tokenizer, run.read_recorded_job().spec.data.sequence_length)
    return Exported(folder=str(folder), step=checkpoint.step)
