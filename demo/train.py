"""Trains gpt-oss-tiny from a seed: ``python -m antiphon.demo.train --out FOLDER``.

On one H200 the defaults fit into ten minutes; ``--smoke`` runs a few steps of a smaller model on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from antiphon.demo.dataset import IGNORED, Shard, shard_stream
from antiphon.demo.network import TINY, TinyGptOss, placement
from antiphon.demo.optimizer import Optimizer, schedule
from antiphon.demo.vocabulary import load_vocabulary
from antiphon.model.config import GptOssConfig


@dataclass(frozen=True, slots=True)
class Settings:
    """One training run."""

    out: Path
    steps: int = 6000
    rows: int = 128
    row_tokens: int = 640
    seed: int = 0
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    attention: str = "flex"
    compiled: bool = True
    workers: int = 14
    matrix_rate: float = 0.012
    other_rate: float = 1.5e-3
    balance: float = 0.01
    max_seconds: float = 1e9
    """Training ends by then: a machine too slow for ``steps`` runs through the schedule by time instead."""
    score_per_skill: int = 100
    config: GptOssConfig = TINY


SMOKE = {
    "steps": 30,
    "rows": 3,
    "row_tokens": 640,
    "device": "cpu",
    "dtype": torch.float32,
    "attention": "masked",
    "compiled": False,
    "workers": 0,
    "score_per_skill": 2,
    "config": dataclasses.replace(TINY, num_hidden_layers=2, hidden_size=128, intermediate_size=128),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows on the device.

    Attributes:
        inputs: [R, T] int64.
        documents: [R, T] int32.
        positions: [M] int64, flat indices of the positions to train.
        targets: [M] int64, IGNORED where unused.
    """

    inputs: Tensor
    documents: Tensor
    positions: Tensor
    targets: Tensor


def batches(settings: Settings) -> Iterator[Batch]:
    """The stream of training batches; M is fixed so that compiled code sees one shape."""
    trained = int(settings.rows * settings.row_tokens * 0.4) // 128 * 128
    shards = shard_stream(settings.seed, settings.rows, settings.row_tokens, settings.workers, settings.steps)
    for shard in shards:
        yield to_device(shard, trained, settings.device)


def to_device(shard: Shard, trained: int, device: str) -> Batch:
    """A shard as tensors; at most ``trained`` positions are trained."""
    flat = torch.from_numpy(shard.targets.reshape(-1)).long()
    positions = (flat != IGNORED).nonzero().squeeze(1)[:trained]
    targets = torch.full((trained,), IGNORED)
    targets[: len(positions)] = flat[positions]
    padded = torch.zeros(trained, dtype=torch.long)
    padded[: len(positions)] = positions
    inputs, documents = torch.from_numpy(shard.inputs).long(), torch.from_numpy(shard.documents).int()
    cuda = device.startswith("cuda")
    moved = [t.pin_memory() if cuda else t for t in (inputs, documents, padded, targets)]
    return Batch(*(t.to(device, non_blocking=cuda) for t in moved))


LossFunction = Callable[[Batch], tuple[Tensor, Tensor]]


def loss_function(model: TinyGptOss, settings: Settings) -> LossFunction:
    """batch -> (cross-entropy over the trained positions, load-balance loss).

    Layers are compiled one by one: all of a kind share their code, so there are two compilations, not eight.
    """

    def head(hidden: Tensor, batch: Batch) -> Tensor:
        logits = model.logits(hidden.flatten(0, 1)[batch.positions])
        return torch.nn.functional.cross_entropy(logits, batch.targets, ignore_index=IGNORED)

    if settings.compiled:
        head = torch.compile(head, dynamic=False)
        for block in model.blocks:
            block.compile(dynamic=False)

    def loss(batch: Batch) -> tuple[Tensor, Tensor]:
        place = placement(settings.config, batch.documents, settings.attention == "flex", settings.dtype)
        hidden, balance = model(batch.inputs, place)
        return head(hidden, batch), balance

    return loss


@dataclass(slots=True)
class Record:
    """What a run leaves behind besides the weights."""

    losses: list[tuple[int, float]]
    tokens: int
    seconds: float
    steps: int


def train(model: TinyGptOss, settings: Settings, checkpoint: Callable[[int], None]) -> Record:
    """Train in place; ``checkpoint(step)`` is called now and then."""
    optimizer = Optimizer(model, settings.matrix_rate, settings.other_rate)
    loss_of = loss_function(model, settings)
    losses: list[tuple[int, Tensor]] = []
    began = time.monotonic()
    steady = began
    step = 0
    with tqdm(total=settings.steps, desc="training", mininterval=5.0) as bar:
        for step, batch in enumerate(batches(settings)):
            cross_entropy, balance = loss_of(batch)
            (cross_entropy + settings.balance * balance).backward()  # type: ignore[no-untyped-call]
            elapsed = time.monotonic() - began
            optimizer.step(schedule(max(step / settings.steps, elapsed / settings.max_seconds)))
            if step % 10 == 0:
                losses.append((step, cross_entropy.detach()))
            if step % 200 == 0:
                bar.set_postfix(loss=f"{_finite(cross_entropy, step):.4f}", balance=f"{balance.item():.3f}")
            if step == 20:
                steady = time.monotonic()
            bar.update()
            if step % 2500 == 2499:
                checkpoint(step)
            if elapsed > settings.max_seconds:
                break
    steps = step + 1
    tokens = steps * settings.rows * settings.row_tokens
    seconds = time.monotonic() - began
    if steps > 40:
        rate = (steps - 21) * settings.rows * settings.row_tokens / (time.monotonic() - steady)
        tqdm.write(f"{rate / 1e6:.3f} M tokens/s after the first 20 steps ({steady - began:.1f} s)")
    return Record([(at, float(value)) for at, value in losses], tokens, seconds, steps)


def _finite(loss: Tensor, step: int) -> float:
    value = float(loss.detach())
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss is {value} at step {step}")
    return value


def plot(record: Record, path: Path) -> None:
    """The loss curve as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot([step for step, _ in record.losses], [loss for _, loss in record.losses], linewidth=0.8)
    axes.set(xlabel="step", ylabel="cross-entropy of replies, nats per token", yscale="log")
    axes.set_title("gpt-oss-tiny: training loss")
    axes.grid(visible=True, alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def build_model(settings: Settings) -> TinyGptOss:
    """The model with its initial weights, a function of the seed alone."""
    torch.manual_seed(settings.seed)
    vocabulary = load_vocabulary()
    model = TinyGptOss(settings.config, vocabulary.unseen, vocabulary.unseen_tokens)
    return model.to(settings.device)


def run(settings: Settings) -> dict[str, object]:
    """Train, pack, score; returns the metrics that are also written to ``metrics.json``."""
    from antiphon.demo.packed import load_weights, shipped_weights, write_packed
    from antiphon.demo.score import score_model

    settings.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    vocabulary = load_vocabulary()
    model = build_model(settings)
    packed = settings.out / "gpt-oss-tiny.bin.xz"

    def save(step: int) -> None:
        write_packed(shipped_weights(model), settings.config, vocabulary.token_ids, packed, preset=0)

    record = train(model, settings, save)
    plot(record, settings.out / "loss.png")
    metrics: dict[str, object] = {
        "steps": record.steps,
        "tokens": record.tokens,
        "seconds": round(record.seconds, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": record.losses,
        "seed": settings.seed,
        "torch": torch.__version__,
    }
    (settings.out / "metrics.json").write_text(json.dumps(metrics))
    weights = shipped_weights(model)
    write_packed(weights, settings.config, vocabulary.token_ids, packed)
    load_weights(model, weights)
    torch.set_float32_matmul_precision("highest")
    table = score_model(model, vocabulary, settings.score_per_skill, settings.out / "answers.jsonl")
    metrics["scores"] = table
    (settings.out / "metrics.json").write_text(json.dumps(metrics))
    return metrics


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true", help="a few steps of a smaller model on the CPU")
    for name, kind in (
        ("steps", int),
        ("rows", int),
        ("seed", int),
        ("workers", int),
        ("max_seconds", float),
        ("attention", str),
        ("matrix_rate", float),
        ("other_rate", float),
        ("score_per_skill", int),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    chosen = vars(parser.parse_args())
    smoke = chosen.pop("smoke")
    given = {name: value for name, value in chosen.items() if value is not None}
    settings = Settings(**{**(SMOKE if smoke else {}), **given})
    run(settings)


if __name__ == "__main__":
    main()
