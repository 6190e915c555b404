"""Trains gpt-oss-tiny from a seed: ``python -m antiphon.demo.train --out FOLDER``.

On one H200 the defaults fit into ten minutes; ``--smoke`` runs a few steps of a smaller model on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from antiphon.demo.dataset import IGNORED, Shard, shard_stream
from antiphon.demo.network import Packing, TinyGptOss, placement
from antiphon.demo.optimizer import Optimizer, schedule
from antiphon.demo.packed import load_weights, read_packed, shipped_weights, start_from, write_packed
from antiphon.demo.saver import Saver
from antiphon.demo.shape import TINY
from antiphon.demo.vocabulary import VOCABULARY_FILE, load_vocabulary
from antiphon.model.config import GptOssConfig


@dataclass(frozen=True, slots=True)
class Settings:
    """One training run."""

    out: Path
    steps: int | None = None
    """Optimiser steps; None: as many as fit into ``max_seconds`` at the speed of the first ones."""
    rows: int = 64
    row_tokens: int = 1024
    seed: int = 0
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    attention: str = "flex"
    compiled: bool = True
    workers: int = 10
    matrix_rate: float = 0.012
    other_rate: float = 1.5e-3
    balance: float = 0.01
    max_seconds: float = 600.0
    """Training ends by then: a machine too slow for ``steps`` runs through the schedule by time instead."""
    score_per_skill: int = 100
    config: GptOssConfig = TINY
    init: Path | None = None
    """A packed model to go on from, with a schedule of its own; None: from random weights."""
    vocabulary: Path = VOCABULARY_FILE
    """Rows and words; with ``init`` it may have more rows than those weights."""


SMOKE = {
    "steps": 30,
    "rows": 2,
    "row_tokens": 1024,
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
        documents, positions: [R, T] int32.
        trained: [M] int64, flat indices of the places to train.
        targets: [M] int64, IGNORED where unused.
    """

    inputs: Tensor
    documents: Tensor
    positions: Tensor
    trained: Tensor
    targets: Tensor


def batches(settings: Settings) -> Iterator[Batch]:
    """The stream of training batches; M is fixed so that compiled code sees one shape."""
    trained = int(settings.rows * settings.row_tokens * TRAINED_SHARE) // 128 * 128
    count = settings.steps or MOST_STEPS
    shards = shard_stream(
        *(settings.seed, settings.rows, settings.row_tokens, settings.workers, count), settings.vocabulary
    )
    for shard in shards:
        yield to_device(shard, trained, settings.device)


def to_device(shard: Shard, trained: int, device: str) -> Batch:
    """A shard as tensors; at most ``trained`` places are trained."""
    flat = torch.from_numpy(shard.targets.reshape(-1)).long()
    places = (flat != IGNORED).nonzero().squeeze(1)[:trained]
    targets = torch.full((trained,), IGNORED)
    targets[: len(places)] = flat[places]
    padded = torch.zeros(trained, dtype=torch.long)
    padded[: len(places)] = places
    inputs = torch.from_numpy(shard.inputs).long()
    documents, positions = torch.from_numpy(shard.documents).int(), torch.from_numpy(shard.positions).int()
    cuda = device.startswith("cuda")
    moved = [t.pin_memory() if cuda else t for t in (inputs, documents, positions, padded, targets)]
    return Batch(*(t.to(device, non_blocking=cuda) for t in moved))


TRAINED_SHARE = 0.5
"""Room for the places to train, as a share of all; a little more than shards have."""
MOST_STEPS = 100_000
FITTED_AT, FITTED_FROM = 300, 60
"""The steps whose speed says how many fit."""
SAVED_EVERY = 1000
"""Steps between two savings, so that a run that is cut short leaves weights to go on from."""
LossFunction = Callable[[Batch], tuple[Tensor, Tensor]]


def loss_function(model: TinyGptOss, settings: Settings) -> LossFunction:
    """batch -> (cross-entropy over the trained positions, load-balance loss).

    Layers are compiled one by one: all of a kind share their code, so there are two compilations, not eight.
    """

    def head(hidden: Tensor, batch: Batch) -> Tensor:
        logits = model.logits(hidden.flatten(0, 1)[batch.trained])
        return torch.nn.functional.cross_entropy(logits, batch.targets, ignore_index=IGNORED)

    if settings.compiled:
        head = torch.compile(head, dynamic=False)
        for block in model.blocks:
            block.compile(dynamic=False)

    def loss(batch: Batch) -> tuple[Tensor, Tensor]:
        packing = Packing(batch.documents, batch.positions)
        place = placement(settings.config, packing, settings.attention == "flex", settings.dtype)
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


def train(model: TinyGptOss, settings: Settings, checkpoint: Callable[[], None]) -> Record:
    """Train in place; ``checkpoint`` is called now and then."""
    optimizer = Optimizer(model, settings.matrix_rate, settings.other_rate)
    loss_of = loss_function(model, settings)
    losses: list[tuple[int, Tensor]] = []
    began, steady = time.monotonic(), 0.0
    total, step, waited = settings.steps, 0, 0.0
    stream = batches(settings)
    with tqdm(total=total, desc="training", mininterval=5.0) as bar:
        while total is None or step < total:
            asked = time.monotonic()
            batch = next(stream)
            waited += time.monotonic() - asked
            elapsed = time.monotonic() - began
            if elapsed > settings.max_seconds:
                break
            clock = (elapsed - steady) / (settings.max_seconds - steady)
            progress = _progress(step / total if total else None, clock)
            cross_entropy, balance = loss_of(batch)
            (cross_entropy + settings.balance * balance).backward()  # type: ignore[no-untyped-call]
            optimizer.step(schedule(step, progress))
            if step % 10 == 0:
                losses.append((step, cross_entropy.detach()))
            if step % 200 == 0:
                bar.set_postfix(loss=f"{_finite(cross_entropy, step):.4f}", waited=f"{waited:.1f}")
            step += 1
            bar.update()
            if step == FITTED_FROM:
                _finite(cross_entropy, step)  # waits for the device
                steady = time.monotonic() - began
            if step == FITTED_AT and total is None:
                _finite(cross_entropy, step)
                total = bar.total = fitting_steps(settings.max_seconds, time.monotonic() - began, steady)
            if step % SAVED_EVERY == 0:
                checkpoint()
    if settings.device.startswith("cuda"):
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    if step > FITTED_FROM:
        rate = (step - FITTED_FROM) * settings.rows * settings.row_tokens / (seconds - steady)
        tqdm.write(f"{rate / 1e6:.3f} M tokens/s after {steady:.1f} s, {waited:.1f} s without data")
    kept = [(at, float(value)) for at, value in losses]
    return Record(kept, step * settings.rows * settings.row_tokens, seconds, step)


def _progress(done: float | None, clock: float) -> float:
    """How far the schedule is: by the steps done, or by the clock when it is more than 2 % ahead of them."""
    return clock if done is None or clock > done + 0.02 else done


def fitting_steps(max_seconds: float, elapsed: float, steady: float) -> int:
    """How many steps fit, seen after FITTED_AT of them, the first FITTED_FROM of which took ``steady``.

    3 % are kept back, since what ends by the clock is not repeatable.
    """
    rate = (FITTED_AT - FITTED_FROM) / (elapsed - steady)
    return max(FITTED_AT + int(rate * (0.97 * max_seconds - elapsed)), FITTED_AT + 1)


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
    """The model with its initial weights: a function of the seed, and of the packed model to go on from."""
    torch.manual_seed(settings.seed)
    vocabulary = load_vocabulary(settings.vocabulary)
    model = TinyGptOss(settings.config, vocabulary.unseen, vocabulary.unseen_tokens)
    if settings.init is not None:
        known = start_from(model, read_packed(settings.init), vocabulary.token_ids)
        tqdm.write(f"going on from {settings.init}: {known} of {vocabulary.unseen} rows known")
    return model.to(settings.device)


def run(settings: Settings) -> dict[str, object]:
    """Train, pack, score; returns the metrics that are also written to ``metrics.json``.

    Whatever ends the training early, the weights of its last steps are kept.
    """
    from antiphon.demo.score import score_model

    settings.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    vocabulary = load_vocabulary(settings.vocabulary)
    kept_vocabulary = settings.out / VOCABULARY_FILE.name
    if settings.vocabulary.resolve() != kept_vocabulary.resolve():
        shutil.copyfile(settings.vocabulary, kept_vocabulary)
    model = build_model(settings)
    saver = Saver(settings.out / "gpt-oss-tiny.bin.xz", settings.config, vocabulary.token_ids)
    try:
        record = train(model, settings, lambda: saver.save(model))
    except BaseException:  # an interrupt by hand above all
        saver.save(model)
        raise
    finally:
        saver.wait()
    plot(record, settings.out / "loss.png")
    metrics: dict[str, object] = {
        "steps": record.steps,
        "tokens": record.tokens,
        "seconds": round(record.seconds, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": record.losses,
        "seed": settings.seed,
        "init": settings.init and hashlib.sha256(settings.init.read_bytes()).hexdigest(),
        "torch": torch.__version__,
    }
    kept_metrics = settings.out / "metrics.json"
    kept_metrics.write_text(json.dumps(metrics))
    weights = shipped_weights(model)
    write_packed(weights, settings.config, vocabulary.token_ids, saver.path)
    load_weights(model, weights)
    torch.set_float32_matmul_precision("highest")
    began = time.monotonic()
    metrics["scores"] = score_model(
        model, settings.score_per_skill, settings.out / "answers.jsonl", vocabulary_file=settings.vocabulary
    )
    metrics["scored_in_s"] = round(time.monotonic() - began, 1)
    kept_metrics.write_text(json.dumps(metrics))
    return metrics


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true", help="a few steps of a smaller model on the CPU")
    for name, kind in (
        ("init", Path),
        ("vocabulary", Path),
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
    if settings.init is not None:
        settings = dataclasses.replace(settings, config=read_packed(settings.init).config)
    run(settings)


if __name__ == "__main__":
    main()
