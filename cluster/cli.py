"""The ``antiphon`` command. Each subcommand imports what it needs when it runs, so that starting is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from antiphon import __version__
from antiphon.cluster.cli_bench import bench_app
from antiphon.cluster.cli_eval import eval_command
from antiphon.cluster.cli_operate import roll, scale, status, upgrade
from antiphon.cluster.cli_plan import plan
from antiphon.protocol.errors import AntiphonError

app = typer.Typer(
    name="antiphon",
    help="Serve GPT-OSS with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
checkpoint_app = typer.Typer(help="Look at and make checkpoints.", no_args_is_help=True)
config_app = typer.Typer(help="Check and show deployment files.", no_args_is_help=True)
harmony_app = typer.Typer(help="Render and parse the Harmony format.", no_args_is_help=True)
kernels_app = typer.Typer(help="Build GPU kernels ahead of time.", no_args_is_help=True)
weights_app = typer.Typer(help="Look at and prune converted weights on disk.", no_args_is_help=True)
app.command()(plan)
app.command()(scale)
app.command()(roll)
app.command()(upgrade)
app.command()(status)
app.command("eval")(eval_command)
app.add_typer(bench_app, name="bench")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(config_app, name="config")
app.add_typer(harmony_app, name="harmony")
app.add_typer(kernels_app, name="kernels")
app.add_typer(weights_app, name="weights")


def main() -> None:
    """Entry point: an error made for users is one line on stderr and exit status 1."""
    try:
        app()
    except AntiphonError as error:
        print(f"antiphon: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output left, as in `antiphon ... | head`
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.filename is None:  # not about a file that somebody named
            raise
        print(f"antiphon: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or Hugging Face id; overrides model.path.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Deployment file; a small one for this machine when absent.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Overrides router.port; 0 picks a free one.")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log every process at level info.")
    ] = False,
    metrics_compat: Annotated[
        str | None,
        typer.Option(help="vllm: figures that vLLM also has appear under its names, too; metrics.compat."),
    ] = None,
) -> None:
    """Start a whole deployment and run it until Ctrl-C."""
    from antiphon.cluster.cli_serve import serve as run

    run(model, config, port, verbose=verbose, metrics_compat=metrics_compat)


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One question; without it a prompt that keeps the conversation.")
    ] = None,
    url: Annotated[
        str, typer.Option(envvar="ANTIPHON_URL", help="Where the router listens.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="ANTIPHON_API_KEY", help="Sent as a bearer.")] = None,
    model: Annotated[str | None, typer.Option(help="The served one when absent.")] = None,
    effort: Annotated[str | None, typer.Option(help="Reasoning effort: low, medium or high.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")] = None,
) -> None:
    """Talk to a running deployment: reasoning dimmed, the answer plain."""
    from antiphon.cluster.cli_chat import ChatClient, ChatOptions, converse

    options = ChatOptions(model=model, effort=effort, max_tokens=max_tokens, temperature=temperature)
    with ChatClient(url, api_key, options) as client:
        converse(client, prompt)


@app.command()
def top(
    url: Annotated[
        str,
        typer.Argument(
            envvar="ANTIPHON_METRICS_URL", help="The supervisor's pages, as `antiphon serve` prints them."
        ),
    ],
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
) -> None:
    """Watch a running deployment: pools, queues, KV pages, tokens per second, transfers."""
    from antiphon.cluster.cli_top import top as watch

    watch(url, interval, once=once)


@checkpoint_app.command("inspect")
def checkpoint_inspect(
    directory: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")],
) -> None:
    """Print a checkpoint's layout, sizes and problems; exit status 1 when there is a problem."""
    from antiphon.cluster.cli_checkpoint import inspect

    inspect(directory)


@checkpoint_app.command("synthesize")
def checkpoint_synthesize(
    directory: Annotated[Path, typer.Argument(help="Folder to write; must be empty or absent.")],
    like: Annotated[str, typer.Option(help="tiny, gpt-oss-20b or gpt-oss-120b.")] = "tiny",
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes on the same device.")] = 0,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda: what draws the numbers; cuda when absent and there is one."),
    ] = None,
) -> None:
    """Write a random checkpoint of a given shape, in the Hugging Face layout."""
    from antiphon.cluster.cli_checkpoint import synthesize

    synthesize(directory, like, seed, device)


@config_app.command("check")
def config_check(
    file: Annotated[Path, typer.Argument(help="A deployment file.")],
    gpu_memory_gib: Annotated[float, typer.Option(min=1, help="Memory of one GPU.")] = 139.0,
    node_gpus: Annotated[int, typer.Option(min=1, help="GPUs of one machine.")] = 8,
) -> None:
    """Say whether a deployment file can be used and what it takes; names the key and the value when not."""
    from antiphon.cluster.cli_config import check_file

    check_file(file, gpu_memory_gib, node_gpus)


@config_app.command("show")
def config_show(
    file: Annotated[
        Path | None, typer.Argument(help="A deployment file; the default one when absent.")
    ] = None,
) -> None:
    """Print a deployment file with every default filled in."""
    from antiphon.cluster.cli_serve import show_config

    show_config(file)


@harmony_app.command("render")
def harmony_render(
    request: Annotated[
        Path, typer.Argument(help="A chat or responses request as JSON; - reads standard input.")
    ] = Path("-"),
    ids: Annotated[bool, typer.Option("--ids", help="Token ids instead of text.")] = False,
    date: Annotated[str | None, typer.Option(help="YYYY-MM-DD in place of today.")] = None,
) -> None:
    """Print the prompt that a request becomes."""
    from antiphon.cluster.cli_harmony import render

    render(request, ids=ids, date=date)


@harmony_app.command("parse")
def harmony_parse(
    answer: Annotated[
        Path, typer.Argument(help="What follows <|start|>assistant, with markers; - reads standard input.")
    ] = Path("-"),
    tools: Annotated[
        Path | None, typer.Option(help="The request's tools as a JSON list; any name is taken when absent.")
    ] = None,
    stream: Annotated[
        int | None, typer.Option(min=1, help="Feed the parser so many tokens at a time.")
    ] = None,
    cut_short: Annotated[bool, typer.Option(help="The answer ended at its length limit.")] = False,
) -> None:
    """Print the chat message that an answer becomes."""
    from antiphon.cluster.cli_harmony import parse

    parse(answer, tools=tools, step_tokens=stream, cut_short=cut_short)


@kernels_app.command("build")
def kernels_build(
    out: Annotated[
        Path | None,
        typer.Option(help="Where workers will look, their ANTIPHON_KERNEL_LIBRARY_DIR; built in place."),
    ] = None,
    models: Annotated[
        str, typer.Option(help="Presets whose Triton kernels are compiled; empty leaves them to the workers.")
    ] = "gpt-oss-20b,gpt-oss-120b",
    layouts: Annotated[
        str, typer.Option(help="Layouts of workers that kernels are compiled for.")
    ] = "TP1,TP2,EP2 TP2,TP4,EP4 TP4,TP8,EP8 TP8",
    page_size: Annotated[int, typer.Option(min=16, help="Positions of a KV page.")] = 64,
    max_batch_size: Annotated[int, typer.Option(min=1, help="Sequences decoded together, at most.")] = 256,
) -> None:
    """Compile every kernel for sm_90a ahead of time; needs nvcc and a C compiler, but no GPU."""
    from antiphon.cluster.cli_kernels import build_kernels

    presets = [name for name in models.split(",") if name]
    build_kernels(out, presets, layouts.split(","), page_size, max_batch_size)


@weights_app.command("list")
def weights_list(
    directory: Annotated[Path, typer.Argument(help="The folder of weight_cache.directory.")],
) -> None:
    """Print what a folder of converted weights holds, the least recently used first."""
    from antiphon.cluster.cli_weights import list_weights

    list_weights(directory)


@weights_app.command("prune")
def weights_prune(
    directory: Annotated[Path, typer.Argument(help="The folder of weight_cache.directory.")],
    limit_gib: Annotated[float, typer.Option(min=0, help="What may stay; 0 deletes everything.")],
) -> None:
    """Delete the least recently used converted weights, and what a killed worker left unfinished."""
    from antiphon.cluster.cli_weights import prune_weights

    prune_weights(directory, limit_gib)


if __name__ == "__main__":
    main()
