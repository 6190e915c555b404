"""``antiphon scale | roll | upgrade | status``: to a deployment that runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from antiphon.cluster.control import (
    Answer,
    AskStatus,
    Request,
    RollAll,
    ScalePool,
    UpgradeTo,
    ask,
    find_socket,
)
from antiphon.protocol.errors import ConfigError

Socket = Annotated[
    Path | None,
    typer.Option("--socket", envvar="ANTIPHON_CONTROL", help="Its control socket; needed when several run."),
]


def scale(
    pools: Annotated[list[str], typer.Argument(help="prefill=N, decode=N or both.")], socket: Socket = None
) -> None:
    """Change the size of a pool of a running deployment; returns once the new workers serve."""
    wanted = {}
    for pool in pools:
        name, sign, number = pool.partition("=")
        if not sign or not number.isdecimal():
            raise ConfigError(f"{pool}: expected ROLE=REPLICAS, as in prefill=3")
        wanted[name] = int(number)
    _show(_ask(socket, ScalePool(wanted)))


def roll(socket: Socket = None) -> None:
    """Restart every process of a running deployment, one at a time, while the others serve."""
    _show(_ask(socket, RollAll()))


def upgrade(
    revision: Annotated[str, typer.Argument(help="ray.revision in the deployment file as it is now.")],
    socket: Socket = None,
) -> None:
    """Replace the workers of a running deployment by those of a new revision, without a failed request."""
    _show(_ask(socket, UpgradeTo(revision)))


def status(socket: Socket = None) -> None:
    """Print what runs in a running deployment."""
    _show(_ask(socket, AskStatus()))


def _ask(socket: Path | None, request: Request) -> Answer:
    return asyncio.run(ask(socket or find_socket(), request))


def _show(answer: Answer) -> None:
    if answer.said:
        print(answer.said)
    for member in answer.members:
        ready = "ready" if member.ready else f"not ready: {member.detail}" if member.detail else "not ready"
        print(
            f"{member.worker_id:<12} {member.state:<9} {ready}, {member.requests} requests, "
            f"{member.pages_held} pages, {member.restarts} restarts"
        )
