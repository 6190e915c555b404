"""Refines a packed model on more examples, on a CPU: ``python -m antiphon.demo.refine IN OUT --steps 300``.

For when the phrasings grew after a training run. Expert matrices stay as they are: a step is cheap then, and
the MXFP4 codes do not move. Attention, routers, norms, biases and token rows are trained further by AdamW.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from antiphon.demo.dataset import make_shard
from antiphon.demo.network import TinyGptOss
from antiphon.demo.packed import load_weights, read_packed, shipped_weights, write_packed
from antiphon.demo.train import Settings, loss_function, to_device
from antiphon.demo.vocabulary import load_vocabulary
from antiphon.protocol.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Refinement:
    """One run of refining.

    ``max_seconds`` ends it early: the learning rate then follows the time instead of the steps.
    """

    steps: int = 300
    rows: int = 20
    row_tokens: int = 384
    seed: int = 777
    rate: float = 3e-4
    max_seconds: float = 1e9
    save_every: int = 40


def open_frozen(path: Path) -> TinyGptOss:
    """The model of a packed file, with weights as they ship, none of them trainable.

    Raises:
        CheckpointError: the file keeps other token rows than ``vocabulary.json`` names.
    """
    packed, vocabulary = read_packed(path), load_vocabulary()
    if packed.token_ids != vocabulary.token_ids:
        raise CheckpointError(f"{path}: its token rows are not those of the vocabulary file")
    model = TinyGptOss(packed.config, vocabulary.unseen, vocabulary.unseen_tokens)
    load_weights(model, packed.weights)
    return model


def rate_factor(progress: float, step: int) -> float:
    """Up over 8 steps, flat for 30 % of the way, then linearly down to 2 %."""
    fall = 1.0 if progress < 0.3 else max((1 - progress) / 0.7, 0.02)
    return min(1.0, (step + 1) / 8) * fall


def refine(model: TinyGptOss, settings: Refinement, out: Path) -> list[float]:
    """Train in place and write ``out`` now and then; returns the loss of every step."""
    trained: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not name.endswith((".gate_up", ".down")):
            parameter.requires_grad_(True)
            trained.append(parameter)
    optimizer = torch.optim.AdamW(trained, lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.0)
    loss_of = loss_function(
        model,
        Settings(out, device="cpu", dtype=torch.bfloat16, attention="masked", config=model.config),
    )
    token_ids = load_vocabulary().token_ids
    most = int(settings.rows * settings.row_tokens * 0.45) // 128 * 128
    losses: list[Tensor] = []
    began = time.monotonic()
    for step in tqdm(range(settings.steps), desc="refining", mininterval=10.0):
        progress = max(step / settings.steps, (time.monotonic() - began) / settings.max_seconds)
        if progress >= 1:
            break
        shard = make_shard(settings.seed, step, settings.rows, settings.row_tokens)
        cross_entropy, balance = loss_of(to_device(shard, most, "cpu"))
        (cross_entropy + 0.01 * balance).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * rate_factor(progress, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(cross_entropy.detach())
        if step % settings.save_every == settings.save_every - 1:
            write_packed(shipped_weights(model), model.config, token_ids, out, preset=0)
    write_packed(shipped_weights(model), model.config, token_ids, out)
    return [float(loss) for loss in losses]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=777)
    parser.add_argument("--max-seconds", type=float, default=1e9)
    chosen = parser.parse_args()
    settings = Refinement(steps=chosen.steps, seed=chosen.seed, max_seconds=chosen.max_seconds)
    losses = refine(open_frozen(chosen.source), settings, chosen.out)
    last = losses[-20:]
    tqdm.write(
        f"loss {losses[0]:.4f} at the first step, {sum(last) / len(last):.4f} over the last {len(last)}"
    )


if __name__ == "__main__":
    main()
