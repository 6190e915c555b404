"""Another system's engine as a sweep's meter: a process of its own interpreter, asked point by point."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from antiphon.benchmarks.peers import program, vllm_weights
from antiphon.benchmarks.peers.program import PEERS, Setup
from antiphon.benchmarks.plan.work import layout_floor_s
from antiphon.benchmarks.records import Layout, Record, checkout_commit, now
from antiphon.benchmarks.sweep.meter import Effort, Meter, NotMeasurable
from antiphon.benchmarks.sweep.points import Point
from antiphon.benchmarks.sweep.replicas import VISIBLE, visible_devices
from antiphon.model.checkpoint.synthesize import synthesize
from antiphon.model.checkpoint.write import write_config
from antiphon.model.config import GptOssConfig, preset
from antiphon.protocol.errors import AntiphonError

TEXT_TOKENS = 199_998
"""Ids below this are text; the engine's benchmark draws its prompts from the same."""
SPARE_TOKENS = 4096 + 64
"""What the first sequences of a batch may decode before its last prompt is computed."""
FIND = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec(sys.argv[1]) is None:
    sys.exit(1)
try:
    print(importlib.metadata.version(sys.argv[1]))
except importlib.metadata.PackageNotFoundError:
    print("unknown version")
"""
"""Prints the version of a package that can be imported, without importing it."""
END_TIMEOUT_S = 30.0
LOG_BYTES = 1500
GRAPHED_TOKENS = 1024
"""Prompts up to this many tokens get a graph too."""
MEASURED_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
}
"""Nothing is fetched, and nobody is told."""
_CHOSEN = re.compile(r"Using .*backend.*")
"""Lines in which a system says how it computes."""

WEIGHTS_IN_WORDS = {"dummy": "the system's own random ones"}
"""By the format they are loaded in; all others are this project's, or a checkpoint's that was named."""

Weights = Literal["synthesized", "files", "own"]
"""This project's random weights, made inside the system where that is known how, else written to files;
always as files; or whatever the system fills a model with that has none."""


class PeerMissing(AntiphonError):
    """A system is not installed for the interpreter that was named; the message says which."""


@dataclass(frozen=True, slots=True)
class PeerSystem:
    """Another system and where it is installed."""

    name: str
    python: str
    """Its interpreter."""
    version: str

    @property
    def label(self) -> str:
        """Name and version: what its figures are kept under, and what stands for a commit in them."""
        return f"{self.name} {self.version}"


def find_peer(name: str, python: str) -> PeerSystem:
    """Ask an interpreter for a system, without importing it.

    Raises:
        PeerMissing: it is not installed there, there is no such interpreter, or no such peer is known.
    """
    if name not in PEERS:
        raise PeerMissing(f"{name}: no such peer; known are {', '.join(PEERS)}")
    try:
        done = subprocess.run([python, "-c", FIND, name], capture_output=True, text=True, check=False)
    except OSError as error:
        raise PeerMissing(f"{name}: {python}: {error.strerror}") from error
    if done.returncode:
        raise PeerMissing(f"{name}: not installed for {python}; skipped")
    return PeerSystem(name, python, done.stdout.strip())


class PeerMeter:
    """A running peer."""

    def __init__(self, system: PeerSystem, layout: Layout, process: subprocess.Popen[str], log: Path) -> None:
        self._system, self._layout, self._process, self._log = system, layout, process, log
        self._device = ""
        self._facts: dict[str, object] = {}

    def start(self, setup: Setup) -> None:
        """Load the model.

        Raises:
            NotMeasurable: the peer could not; the message is its own.
        """
        begin = time.monotonic()
        answer = self._ask(asdict(setup))
        self._device = str(answer["device"])
        self._facts = {
            "weights": WEIGHTS_IN_WORDS.get(setup.load_format, "synthesized"),
            "runner_commit": checkout_commit(),
            "chosen": self._chosen(),
            "start_s": round(time.monotonic() - begin, 1),
        }

    def measure(self, point: Point) -> Record:
        """See ``Meter``."""
        if point.input_tokens is not None:
            asked: dict[str, Any] = {"input_tokens": point.input_tokens}
        else:
            asked = {"batch": point.batch, "context": point.context}
        answer = self._ask(asked)
        value_ms = float(answer.pop("ms"))
        shape = preset(point.model)
        floor_s = layout_floor_s(shape, self._layout, point.input_tokens, point.batch, point.context)
        return Record(
            bench=point.bench,
            model=point.model,
            layout=self._layout.name,
            device=self._device,
            commit=self._system.label,
            date=now(),
            value=round(value_ms, 4),
            unit="ms",
            batch=point.batch,
            input_tokens=point.input_tokens,
            context=point.context,
            floor=round(floor_s * 1e3, 4),
            peer=self._system.label,
            extra={**self._facts, **answer},
        )

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        asked, answers = _pipe(self._process.stdin), _pipe(self._process.stdout)
        try:
            asked.write(json.dumps(message) + "\n")
            asked.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise NotMeasurable(f"{self._system.name} ended: {self._end_of_log()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NotMeasurable(f"{self._system.name}: {answer['error']}")
        return answer

    def _chosen(self) -> list[str]:
        """What the system said of the kernels that it chose."""
        found = _CHOSEN.findall(self._log.read_text(errors="replace"))
        return list(dict.fromkeys(line.strip()[:160] for line in found))

    def _end_of_log(self) -> str:
        return self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace").strip()


@dataclass(frozen=True, slots=True)
class PeerOpener:
    """Implements ``OpenMeter`` for one system."""

    system: PeerSystem
    effort: Effort
    checkpoints: dict[str, Path]
    """By model, a checkpoint's folder; for others the weights are ``weights``."""
    weights: Weights = "synthesized"
    end: float = math.inf
    """Of the monotonic clock: a system that still runs then is killed."""
    devices: tuple[int, ...] = ()
    """Numbers of the GPUs that it may take; all that this process sees when there are none."""
    logs: Path | None = None
    """Folder that keeps what it says, a file for each model and layout; nothing is kept when absent."""

    @contextmanager
    def __call__(self, model: str, layout: Layout, points: Sequence[Point]) -> Iterator[Meter]:
        """See ``OpenMeter``.

        Raises:
            NotMeasurable: the layout has replicas, or the peer does not start.
        """
        if layout.dp > 1:
            raise NotMeasurable(f"{layout.name}: replicas of a peer are not measured")
        with tempfile.TemporaryDirectory(prefix="antiphon-peer-") as temporary:
            setup = self._setup(model, layout, points, Path(temporary))
            log = self._log(model, layout, Path(temporary))
            with log.open("wb") as errors, self._process(errors) as process, _killed_at(self.end, process):
                try:
                    meter = PeerMeter(self.system, layout, process, log)
                    meter.start(setup)
                    yield meter
                finally:
                    _end(process)

    def _setup(self, model: str, layout: Layout, points: Sequence[Point], temporary: Path) -> Setup:
        """With a folder of the model, whatever it takes to have one."""
        folder = self.checkpoints.get(model)
        shape = preset(model)
        if folder is not None:
            return setup_for(shape, folder, layout, points, self.effort)
        folder = temporary / model
        setup = setup_for(shape, folder, layout, points, self.effort)
        if self.weights == "own":
            write_config(folder, shape)
            return replace(setup, load_format="dummy")
        if self.weights == "synthesized" and self.system.name == "vllm":
            write_config(folder, shape)
            vllm_weights.lay_plugin(temporary / "plugin")
            return replace(
                setup,
                load_format=vllm_weights.LOAD_FORMAT,
                path=str(temporary / "plugin"),
                environment={
                    "VLLM_PLUGINS": vllm_weights.PLUGIN,
                    vllm_weights.MODEL_VARIABLE: model,
                },
            )
        synthesize(folder, like=model)
        return setup

    def _log(self, model: str, layout: Layout, temporary: Path) -> Path:
        folder = temporary if self.logs is None else self.logs
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self.system.name}-{model}-{layout.name.replace(' ', '-')}.log"

    def _visible(self) -> dict[str, str]:
        return {VISIBLE: visible_devices(self.devices)} if self.devices else {}

    def _process(self, errors: IO[bytes]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.system.python, str(Path(program.__file__).resolve()), self.system.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | MEASURED_ENVIRONMENT | self._visible(),
            start_new_session=True,
        )


def setup_for(
    shape: GptOssConfig, folder: Path, layout: Layout, points: Sequence[Point], effort: Effort
) -> Setup:
    """An engine for all points of a layout."""
    prompts = [point.input_tokens + 1 for point in points if point.input_tokens is not None]
    decodes = [(point.context or 0) + effort.steps + SPARE_TOKENS for point in points if point.batch]
    return Setup(
        model=str(folder),
        tensor_parallel=layout.tp,
        expert_parallel=layout.ep > 1,
        longest_tokens=min(shape.max_context_tokens, max(prompts + decodes)),
        largest_batch=max([point.batch or 1 for point in points]),
        chunk_tokens=effort.chunk_tokens,
        steps=effort.steps,
        repeats=effort.repeats,
        text_tokens=min(TEXT_TOKENS, shape.vocab_size),
        graph_sizes=graph_sizes(points),
    )


def graph_sizes(points: Sequence[Point]) -> tuple[int, ...]:
    """Tokens of the steps of these points that run from graphs: batches, and short prompts."""
    batches = {point.batch for point in points if point.batch}
    prompts = {point.input_tokens for point in points if (point.input_tokens or 0) <= GRAPHED_TOKENS}
    return tuple(sorted({1} | batches | {tokens for tokens in prompts if tokens}))


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise RuntimeError("the peer was started without pipes")
    return stream


@contextmanager
def _killed_at(end: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """Meanwhile, a clock that kills the process's session at ``end``, whatever it hangs in."""
    if end == math.inf:
        yield
        return
    timer = threading.Timer(max(0.0, end - time.monotonic()), _kill, (process,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[str]) -> None:
    """Close its input, which ends it; what is left of its session is killed."""
    _pipe(process.stdin).close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    _kill(process)
