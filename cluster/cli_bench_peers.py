"""``antiphon bench peers | beside``: other systems on this machine, apart and beside this project."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from antiphon.cluster.bench_options import limit_s, parts, whole
from antiphon.protocol.errors import ConfigError

if TYPE_CHECKING:
    from antiphon.benchmarks.sweep.command import Sizes


class PeerWeights(StrEnum):
    """What a peer's model is filled with."""

    synthesized = "synthesized"
    files = "files"
    own = "own"


def peers(
    peers: Annotated[str, typer.Option(help="Systems to measure: vllm, sglang.")] = "vllm,sglang",
    python: Annotated[
        str,
        typer.Option(
            help="Interpreter that has them; this one's when absent. vllm=PATH,sglang=PATH for each."
        ),
    ] = sys.executable,
    models: Annotated[str, typer.Option(help="Comma-separated.")] = "gpt-oss-20b,gpt-oss-120b",
    layouts: Annotated[str, typer.Option(help="Such as 'TP1,TP2 EP2'.")] = "TP1",
    input_tokens: Annotated[str, typer.Option(help="Prompt lengths.")] = "1024,8192,32768",
    batches: Annotated[str, typer.Option(help="Of decode steps.")] = "1,8,32,64,128",
    contexts: Annotated[str, typer.Option(help="Of decode steps.")] = "8192,32768",
    steps: Annotated[int, typer.Option(min=16, help="Decode steps timed for each point.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts timed for each point.")] = 3,
    chunk: Annotated[int, typer.Option(min=64, help="Prompt tokens of one step.")] = 32768,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(help="MODEL=FOLDER; random weights of the same shape when absent."),
    ] = None,
    weights: Annotated[
        PeerWeights,
        typer.Option(
            help="Without a checkpoint: this project's random weights, made inside vLLM (synthesized) or "
            "written to files; or the system's own."
        ),
    ] = PeerWeights.synthesized,
    again: Annotated[bool, typer.Option(help="Measure what the file holds already once more.")] = False,
    limit: Annotated[
        str | None, typer.Option(help="Begin no point after so long, such as 300s; the next run goes on.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder that keeps what the other system says.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="File of records; the project's peers.json when absent.")
    ] = None,
) -> None:
    """Measure other systems on this machine with the same shapes, prompts and weights; resumes."""
    from antiphon.benchmarks.peers.command import run_command
    from antiphon.benchmarks.records import RESULTS
    from antiphon.benchmarks.sweep.command import Sizes
    from antiphon.benchmarks.sweep.meter import Effort

    named = dict(each.split("=", 1) for each in parts(python) if "=" in each)
    folders = dict(each.split("=", 1) for each in checkpoint or () if "=" in each)
    run_command(
        [(name, named.get(name, sys.executable if named else python)) for name in parts(peers)],
        parts(models),
        RESULTS / "peers.json" if output is None else output,
        layouts=parts(layouts),
        sizes=Sizes(
            [whole(each, "input-tokens") for each in parts(input_tokens)],
            [whole(each, "batches") for each in parts(batches)],
            [whole(each, "contexts") for each in parts(contexts)],
        ),
        effort=Effort(steps, repeats, chunk),
        checkpoints={name: Path(folder) for name, folder in folders.items()},
        weights=weights.value,
        again=again,
        seconds=limit_s(limit),
        logs=logs,
    )


class Device(StrEnum):
    """Where this project measures."""

    cuda = "cuda"
    cpu = "cpu"


def beside(
    peer: Annotated[str, typer.Option(help="The other system: vllm or sglang.")] = "vllm",
    python: Annotated[str, typer.Option(help="Interpreter that has it.")] = sys.executable,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="MODEL=CONTEXT:BATCH,BATCH;CONTEXT:BATCH, the decode steps of a model; may be repeated. "
            "Both published ones at 8,192 when absent.",
        ),
    ] = None,
    input_tokens: Annotated[str, typer.Option(help="Prompt lengths.")] = "1024,8192,32768",
    layouts: Annotated[
        str, typer.Option(help="Such as 'TP1,TP2'; 'TP2 EP2=TP2' where theirs is another.")
    ] = "TP1",
    steps: Annotated[int, typer.Option(min=16, help="Decode steps timed for each point.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts timed for each point.")] = 3,
    chunk: Annotated[int, typer.Option(min=64, help="Prompt tokens of one step of ours.")] = 8192,
    peer_chunk: Annotated[int, typer.Option(min=64, help="Prompt tokens of one step of theirs.")] = 32768,
    weights: Annotated[PeerWeights, typer.Option(help="As of bench peers.")] = PeerWeights.synthesized,
    device: Annotated[Device, typer.Option(help="cpu runs the same road with a small model.")] = Device.cuda,
    ranks: Annotated[int | None, typer.Option(min=1, help="Devices to use; all when absent.")] = None,
    limit: Annotated[
        str | None, typer.Option(help="Begin no point after so long, such as 300s; the next run goes on.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder that keeps what the other system says.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="File of records; the project's beside.json when absent.")
    ] = None,
) -> None:
    """Measure this project and another system at the same points on the same GPUs in one run."""
    from antiphon.benchmarks.peers.beside import Comparison, run_command
    from antiphon.benchmarks.records import RESULTS
    from antiphon.benchmarks.sweep.meter import Effort

    lengths = [whole(each, "input-tokens") for each in parts(input_tokens)]
    chosen = models or ["gpt-oss-20b=8192:1,8,32,128", "gpt-oss-120b=8192:1,8,32,64"]
    run_command(
        Comparison(
            (peer, python),
            dict(_model_sizes(each, lengths) for each in chosen),
            tuple(parts(layouts)),
            Effort(steps, repeats, chunk),
            peer_chunk,
            weights.value,
            device.value,
            ranks,
            limit_s(limit),
            logs,
        ),
        RESULTS / "beside.json" if output is None else output,
    )


def _model_sizes(text: str, input_tokens: list[int]) -> tuple[str, list[Sizes]]:
    """``gpt-oss-20b=8192:1,8;32768:1``: each context has batches of its own.

    Raises:
        ConfigError: another text.
    """
    from antiphon.benchmarks.sweep.command import Sizes

    name, _, rest = text.partition("=")
    found = [Sizes(input_tokens, (), ())]
    for group in filter(None, rest.split(";")):
        context, colon, batches = group.partition(":")
        if not colon:
            raise ConfigError(f"model {text!r}: expected MODEL=CONTEXT:BATCH,BATCH;CONTEXT:BATCH")
        found.append(Sizes((), [whole(each, "model") for each in parts(batches)], [whole(context, "model")]))
    return name, found
