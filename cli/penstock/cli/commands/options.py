"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.output import Format

Job = Annotated[Path, typer.Argument(help="Manifest of the job.")]
RunDirectory = Annotated[Path | None, typer.Option("--run-dir", help="Directory of the run.")]
ExistingRun = Annotated[Path, typer.Argument(help="Directory of a run.")]
Cluster = Annotated[Path | None, typer.Option("--cluster", help="Description of the hardware to plan for.")]
Costs = Annotated[
    Path | None, typer.Option("--costs", help="CSV file with seconds of units that were measured elsewhere.")
]
MeasuredProfile = Annotated[Path | None, typer.Option("--profile", help="Profile to plan with.")]
MetricsPort = Annotated[
    int | None, typer.Option("--metrics-port", min=1, max=65_535, help="Port to serve Prometheus metrics.")
]
Output = Annotated[Format, typer.Option("--output", "-o", help="Format of the data on stdout.")]
