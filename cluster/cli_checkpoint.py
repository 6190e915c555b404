"""``antiphon checkpoint``: look at and make checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from antiphon.model.checkpoint.inspect import inspect as summarise
from antiphon.model.checkpoint.inspect import render
from antiphon.model.checkpoint.synthesize import synthesize as write_random
from antiphon.protocol.errors import CheckpointError, ConfigError


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


def drawing_device(name: str | None) -> str:
    """The device of this name; of none, a CUDA device when there is one, else the CPU.

    Raises:
        ConfigError: neither ``cpu`` nor ``cuda``, or there is no CUDA device.
    """
    if name not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device {name}: must be cpu or cuda")
    there = name != "cpu" and torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError("--device cuda: this machine has no CUDA device")
    return "cuda" if there else "cpu"


def synthesize(directory: Path, like: str, seed: int, device: str | None) -> None:
    """Write a random checkpoint and say what it is.

    Raises:
        AntiphonError: no such shape or device, or the folder cannot be written to.
    """
    began = time.monotonic()
    chosen = drawing_device(device)
    config = write_random(directory, like=like, seed=seed, device=chosen)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(
        f"{directory}: {config.num_hidden_layers} layers, {config.num_experts} experts, "
        f"{size / 1e6:,.0f} MB, seed {seed} on {chosen}, written in {time.monotonic() - began:.1f} s"
    )
