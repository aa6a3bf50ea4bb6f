"""Hidden commands with the names of version 0.1.0, for one more release: they are commands of `penstock-agent` now.

Jobs may pin an image of 0.1.0, so the operator uses names that exist in both. Operators, services and supervisors of
0.1.0 start this version by these names.
"""

from __future__ import annotations

import typer

OF_AGENT = ("pod", "report-pod", "supervise", "ship")
app = typer.Typer()
ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def _start_agent(context: typer.Context) -> None:
    """Run `penstock-agent` with the same arguments."""
    from penstock.agent.__main__ import main

    assert context.info_name is not None
    raise typer.Exit(main([context.info_name, *context.args]))


for name in OF_AGENT:
    app.command(name, hidden=True, context_settings=ANY_ARGUMENTS)(_start_agent)
