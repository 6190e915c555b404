"""Another system's engine as a sweep's meter: a process of its own interpreter, asked point by point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from antiphon.benchmarks.peers import program
from antiphon.benchmarks.peers.program import PEERS, Setup
from antiphon.benchmarks.plan.work import layout_floor_s
from antiphon.benchmarks.records import Layout, Record, checkout_commit, now
from antiphon.benchmarks.sweep.meter import Effort, Meter, NotMeasurable
from antiphon.benchmarks.sweep.points import Point
from antiphon.model.checkpoint.synthesize import synthesize
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

    def start(self, setup: Setup) -> None:
        """Load the model.

        Raises:
            NotMeasurable: the peer could not; the message is its own.
        """
        answer = self._ask(asdict(setup))
        self._device = str(answer["device"])

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
            extra={"weights": "synthesized", "runner_commit": checkout_commit(), **answer},
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

    def _end_of_log(self) -> str:
        return self._log.read_bytes()[-LOG_BYTES:].decode(errors="replace").strip()


@dataclass(frozen=True, slots=True)
class PeerOpener:
    """Implements ``OpenMeter`` for one system."""

    system: PeerSystem
    effort: Effort
    checkpoints: dict[str, Path]
    """By model, a checkpoint's folder; for others one of random weights is written for as long as it runs."""

    @contextmanager
    def __call__(self, model: str, layout: Layout, points: Sequence[Point]) -> Iterator[Meter]:
        """See ``OpenMeter``.

        Raises:
            NotMeasurable: the layout has replicas, or the peer does not start.
        """
        if layout.dp > 1:
            raise NotMeasurable(f"{layout.name}: replicas of a peer are not measured")
        with tempfile.TemporaryDirectory(prefix="antiphon-peer-") as temporary:
            folder = self.checkpoints.get(model)
            if folder is None:
                folder = Path(temporary) / model
                synthesize(folder, like=model)
            log = Path(temporary) / "log"
            with log.open("wb") as errors, self._process(errors) as process:
                try:
                    meter = PeerMeter(self.system, layout, process, log)
                    meter.start(setup_for(preset(model), folder, layout, points, self.effort))
                    yield meter
                finally:
                    _end(process)

    def _process(self, errors: IO[bytes]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.system.python, str(Path(program.__file__).resolve()), self.system.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
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
    )


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise RuntimeError("the peer was started without pipes")
    return stream


def _end(process: subprocess.Popen[str]) -> None:
    """Close its input, which ends it; what is left of its session is killed."""
    _pipe(process.stdin).close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
