"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import Format

Job = Annotated[Path, typer.Argument(help="The job's manifest.")]
RunDirectory = Annotated[Path | None, typer.Option("--run-dir", help="The run's directory.")]
ExistingRun = Annotated[Path, typer.Argument(help="The directory of a run.")]
Cluster = Annotated[Path | None, typer.Option("--cluster", help="Described hardware to plan for.")]
Costs = Annotated[Path | None, typer.Option("--costs", help="Seconds of units measured elsewhere, as CSV.")]
MeasuredProfile = Annotated[Path | None, typer.Option("--profile", help="Measurements to plan with.")]
MetricsPort = Annotated[int | None, typer.Option("--metrics-port", min=1, max=65_535, help="Serve Prometheus metrics.")]
Output = Annotated[Format, typer.Option("--output", "-o", help="Form of the data on stdout.")]
