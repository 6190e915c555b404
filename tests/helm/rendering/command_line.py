"""Command lines in manifests and notes, held against the real command."""

from __future__ import annotations

import typer.main

from antiphon.cluster.cli import app


def parse_with_the_cli(arguments: list[str]) -> None:
    """Raise as the command would for an option that it does not have; runs nothing."""
    command = typer.main.get_command(app)
    context = command.make_context("antiphon", list(arguments), resilient_parsing=False)
    while hasattr(command, "get_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
