"""``antiphon checkpoint``: look at and make checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

from antiphon.model.checkpoint.synthesize import synthesize as write_random


def synthesize(directory: Path, like: str, seed: int) -> None:
    """Write a random checkpoint and say what it is.

    Raises:
        AntiphonError: no such shape, or the folder cannot be written to.
    """
    began = time.monotonic()
    config = write_random(directory, like=like, seed=seed)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"{directory}: {config.num_hidden_layers} layers, {config.num_experts} experts, {size / 1e6:,.0f} MB, "
        f"seed {seed}, written in {time.monotonic() - began:.1f} s"
    )
