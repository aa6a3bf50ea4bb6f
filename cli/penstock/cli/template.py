"""Manifest that `penstock init` writes: the most important fields, and their meaning."""

from __future__ import annotations

from pathlib import Path
from string import Template

from penstock.core.errors import UserError
from penstock.core.job import Metadata

TEMPLATE = Template("""\
# A job for penstock: what to train, on what, with what. Run it with
#
#     penstock run $path
#
# Paths are relative to this file. Most fields have a default and may be left out; unknown fields are refused.
apiVersion: penstock.dev/v1alpha1
kind: PipelineJob
metadata:
  name: $name                   # lower-case letters, digits and dashes

spec:
  model:
    family: llama               # llama (grouped-query attention, SwiGLU) or gpt2 (tied embedding)
    layers: 4
    hidden: 128
    heads: 4                    # must divide hidden
    kvHeads: 2                  # must divide heads; leave it out for as many as heads

  data:
    source: python-stdlib       # or a folder of text, a .jsonl file, a token file (.bin, .npy)
    limitBytes: 8Mi             # read only so much of it; leave it out for everything
    tokenizer: {train: bpe, vocab: 1024}   # or {train: bytes}, or {file: tokenizer.json}
    sequenceLength: 256

  training:
    globalBatch: 4              # sequences per step, however the job is spread
    steps: 100
    optimizer: {kind: adamw, learningRate: 1.0e-3}
    schedule: cosine            # cosine, wsd or constant
    clip: 1.0                   # largest norm of the whole gradient
    precision: fp32             # fp32 or bf16
    seed: 0

  resources:
    device: cpu                 # cpu or cuda
    ranks: 2                    # processes; on cuda one device each
    memoryPerRank: 4Gi          # plans that need more are not considered

  # Empty: the planner decides everything from measurements of this machine. Fields such as dp, tp, pp, microBatch,
  # slices, schedule and stages may be pinned, for example {pp: 2, slices: 4, schedule: 1f1b}.
  parallelism: {}

  checkpoint: {everySteps: 50, keep: 2}
  runPolicy: {backoffLimit: 3}  # failed attempts that are tried again from the last checkpoint
""")


def template(name: str, path: Path) -> str:
    """Return the manifest; raises `UserError` for an invalid name."""
    Metadata(name=name)
    return TEMPLATE.substitute(name=name, path=path)


def write_template(path: Path, name: str, *, overwrite: bool) -> None:
    """Write the manifest; raises `UserError` if the file exists, or cannot be written."""
    write_new(path, template(name, path), overwrite=overwrite)


def write_new(path: Path, text: str, *, overwrite: bool) -> None:
    """Write ``text``; raises `UserError` if the file exists, or cannot be written."""
    try:
        with path.open("w" if overwrite else "x") as file:
            file.write(text)
    except FileExistsError:
        remedy = "choose another file, or overwrite it with --force"
        raise UserError(what="exists already", where=str(path), remedy=remedy) from None
    except OSError as error:
        remedy = f"create the folder with mkdir -p {path.parent}, or choose a writable one"
        raise UserError(what=f"cannot be written: {error.strerror}", where=str(path), remedy=remedy) from None
