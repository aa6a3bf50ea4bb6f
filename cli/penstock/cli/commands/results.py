"""Commands after training: `report` writes a page, `generate` samples text, `export` writes the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.declarations import ExistingRun, Group, Output, command
from penstock.cli.output import Format

app = typer.Typer()


@command(app, Group.RESULTS, "penstock report runs/my-job/1")
def report(run_dir: ExistingRun, form: Output = Format.TEXT) -> None:
    """Write report.html and, for Perfetto, trace.json of a run, and print its summary."""
    from penstock.agent.run_state import read_state
    from penstock.cli.local.reporting import write_report
    from penstock.cli.summary import rendered, summarise
    from penstock.core.run.folder import RunDir

    run = RunDir(run_dir)
    write_report(run)
    state = read_state(run.root)
    summary = summarise(run, state.phase.value, state.attempt)
    output.present(form, lambda: rendered(summary), summary.to_manifest)


@command(app, Group.RESULTS, "penstock generate runs/my-job/1 --prompt 'def main' --tokens 100")
def generate(
    run_dir: ExistingRun,
    prompt: Annotated[str, typer.Option(help="Beginning of the text.")],
    tokens: Annotated[int, typer.Option(min=1, help="Number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal text.")] = 0,
    form: Output = Format.TEXT,
) -> None:
    """Generate text after a prompt with the model of the newest checkpoint."""
    from penstock.core.run.folder import RunDir
    from penstock.trainer.writing import continued

    written = continued(RunDir(run_dir), prompt, tokens=tokens, temperature=temperature, seed=seed)
    if form is Format.TEXT:
        output.write(output.printable(written.text))
    else:
        output.write_data(written.to_manifest(), form)


@command(app, Group.RESULTS, "penstock export runs/my-job/1 --to model")
def export(
    run_dir: ExistingRun,
    to: Annotated[Path, typer.Option("--to", help="Folder to write.")],
    attempt: Annotated[int | None, typer.Option(min=1, help="Use only checkpoints of this attempt.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="Use the checkpoint of this step.")] = None,
    form: Output = Format.TEXT,
) -> None:
    """Write the weights of a checkpoint as safetensors, in the format of transformers."""
    from penstock.core.run.folder import RunDir
    from penstock.trainer.writing import exported

    written = exported(RunDir(run_dir), to, attempt=attempt, step=step)
    if form is Format.TEXT:
        output.say(f"wrote the model of step {written.step} to {to}")
    else:
        output.write_data(written.to_manifest(), form)
