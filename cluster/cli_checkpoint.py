"""``antiphon checkpoint``: look at and make checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

from antiphon.model.checkpoint.inspect import inspect as summarise
from antiphon.model.checkpoint.inspect import render
from antiphon.model.checkpoint.synthesize import synthesize as write_random
from antiphon.protocol.errors import CheckpointError


def inspect(directory: Path) -> None:
    """Print what a checkpoint folder holds.

    Raises:
        CheckpointError: there is no such folder, or loading it would fail; the problems are printed first.
    """
    summary = summarise(directory)
    print(render(summary))
    if not summary.ok:
        more = f" (and {len(summary.problems) - 1} more)" if len(summary.problems) > 1 else ""
        raise CheckpointError(f"{summary.problems[0]}{more}")


def synthesize(directory: Path, like: str, seed: int) -> None:
    """Write a random checkpoint and say what it is.

    Raises:
        AntiphonError: no such shape, or the folder cannot be written to.
    """
    began = time.monotonic()
    config = write_random(directory, like=like, seed=seed)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"{directory}: {config.num_hidden_layers} layers, {config.num_experts} experts, "
        f"{size / 1e6:,.0f} MB, seed {seed}, written in {time.monotonic() - began:.1f} s"
    )
