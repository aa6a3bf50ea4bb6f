"""After training: `report` draws the run, `generate` lets the model write, `export` takes its weights out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.options import ExistingRun, Output
from penstock.cli.output import Format


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(report)
    app.command()(generate)
    app.command()(export)


def report(run_dir: ExistingRun, form: Output = Format.TEXT) -> None:
    """Write the run's report.html, and trace.json for Perfetto; sum the run up."""
    from penstock.agent.attempt import read_result
    from penstock.agent.run_state import read_state
    from penstock.cli.local.reporting import write_report
    from penstock.cli.summary import rendered, summarise
    from penstock.core.run.folder import RunDir

    run = RunDir(run_dir)
    write_report(run)
    state = read_state(run.root)
    summary = summarise(run, state.phase.value, state.attempt, read_result(run))
    if form is Format.TEXT:
        output.show(*rendered(summary))
    else:
        output.write_data(summary.to_manifest(), form)


def generate(
    run_dir: ExistingRun,
    prompt: Annotated[str, typer.Option(help="The beginning of the text.")],
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal text.")] = 0,
    form: Output = Format.TEXT,
) -> None:
    """Let the model of the newest checkpoint go on from a prompt."""
    from penstock.core.run.folder import RunDir
    from penstock.trainer.writing import continued

    written = continued(RunDir(run_dir), prompt, tokens=tokens, temperature=temperature, seed=seed)
    if form is Format.TEXT:
        output.write(output.printable(written.text))
    else:
        output.write_data(written.to_manifest(), form)


def export(
    run_dir: ExistingRun,
    to: Annotated[Path, typer.Option("--to", help="The folder to write.")],
    attempt: Annotated[int | None, typer.Option(min=1, help="Of this attempt's checkpoints.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The checkpoint after so many steps.")] = None,
    form: Output = Format.TEXT,
) -> None:
    """Write the newest checkpoint's weights as safetensors, in the names that transformers reads."""
    from penstock.core.run.folder import RunDir
    from penstock.trainer.writing import exported

    written = exported(RunDir(run_dir), to, attempt=attempt, step=step)
    if form is Format.TEXT:
        output.say(f"wrote the model of step {written.step} to {to}")
    else:
        output.write_data(written.to_manifest(), form)
