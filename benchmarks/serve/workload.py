"""What is sent and when: sessions of one or more turns, drawn from distributions or read from a trace.

A workload is plain data made before the first request, from one seed, so that two servers get the same load.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from antiphon.benchmarks.serve.arrivals import Arrivals, WorkloadError
from antiphon.benchmarks.serve.lengths import Lengths

TRACE_BLOCK_TOKENS = 512
"""Tokens that one entry of a trace's ``hash_ids`` stands for."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt tokens; equal seeds give equal tokens."""

    seed: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: what it adds to the conversation, and how long the answer is."""

    added: tuple[Segment, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow one another; a later one starts ``think_s`` after the answer before it."""

    arrives_s: float
    """Since the start of the run; 0 in a closed loop."""
    turns: tuple[Turn, ...]
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What sessions look like, apart from when they arrive."""

    input_tokens: Lengths
    """Of a first turn, shared prefix included."""
    output_tokens: Lengths
    shared_prefix_tokens: int = 0
    """Beginning that sessions of one group have in common."""
    prefix_groups: int = 1
    turns: int = 1
    turn_tokens: Lengths | None = None
    """What each later turn adds; like ``input_tokens`` without the shared prefix when None."""
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.shared_prefix_tokens < 0 or self.prefix_groups < 1 or self.turns < 1 or self.think_s < 0:
            raise WorkloadError("shared prefix and think time at least 0, prefix groups and turns at least 1")

    def draw(self, rng: random.Random, arrives_s: float) -> Session:
        """One session."""
        turns = []
        for index in range(self.turns):
            if index == 0:
                added = self._first(rng)
            else:
                lengths = self.turn_tokens or self.input_tokens
                tokens = lengths.draw(rng)
                if self.turn_tokens is None:
                    tokens = max(1, tokens - self.shared_prefix_tokens)
                added = (Segment(rng.getrandbits(48), tokens),)
            turns.append(Turn(added, self.output_tokens.draw(rng)))
        return Session(arrives_s, tuple(turns), self.think_s)

    def _first(self, rng: random.Random) -> tuple[Segment, ...]:
        total = self.input_tokens.draw(rng)
        shared = min(self.shared_prefix_tokens, total - 1)
        own = Segment(rng.getrandbits(48), total - shared)
        if not shared:
            return (own,)
        return (Segment(1 + rng.randrange(self.prefix_groups), shared), own)


def open_loop(
    shape: Shape, arrivals: Arrivals, seed: int, *, sessions: int | None, duration_s: float | None
) -> list[Session]:
    """Sessions that arrive until there are ``sessions`` of them or ``duration_s`` has passed.

    Raises:
        WorkloadError: neither bound is given, or no session falls into it.
    """
    if sessions is None and duration_s is None:
        raise WorkloadError("give a number of requests or a duration: a load without end is never run")
    times_rng, shape_rng = random.Random(f"{seed}/times"), random.Random(f"{seed}/shapes")
    drawn: list[Session] = []
    for arrives_s in arrivals.times(times_rng):
        if (duration_s is not None and arrives_s > duration_s) or (
            sessions is not None and len(drawn) >= sessions
        ):
            break
        drawn.append(shape.draw(shape_rng, arrives_s))
    if not drawn:
        raise WorkloadError("no request falls into the run; raise the rate or the duration")
    return drawn


def exact_poisson(
    shape: Shape, rate_per_s: float, seed: int, duration_s: float, warmup_s: float
) -> list[Session]:
    """Poisson arrivals, given that as many fall into the warm-up and as many into the rest as on average.

    Loads of a few seconds then differ by their rate, and not by how many requests chance gave them.

    Raises:
        WorkloadError: no session falls into the rest.
    """
    rng, shape_rng = random.Random(f"{seed}/times"), random.Random(f"{seed}/shapes")
    before, after = round(rate_per_s * warmup_s), round(rate_per_s * (duration_s - warmup_s))
    if after < 1:
        raise WorkloadError("no request falls into the run; raise the rate or the duration")
    times = [rng.uniform(0.0, warmup_s) for _ in range(before)]
    times += [rng.uniform(warmup_s, duration_s) for _ in range(after)]
    return [shape.draw(shape_rng, arrives_s) for arrives_s in sorted(times)]


def standing(shape: Shape, seed: int, count: int, within_s: float) -> list[Session]:
    """``count`` sessions of one turn that a load finds when it begins, sent evenly over its first seconds.

    Their answers are cut to a uniformly drawn part, as those are of which a steady load has ``count`` in
    service at any moment: with them a load of long answers is steady from the start.

    Raises:
        WorkloadError: there is no time to send them in.
    """
    if count < 0 or (count and within_s <= 0):
        raise WorkloadError(f"{count} standing requests need a warm-up to be sent in")
    rng = random.Random(f"{seed}/standing")
    drawn = []
    for index in range(count):
        session = shape.draw(rng, within_s * (index + 0.5) / count)
        first = session.turns[0]
        left = max(1, round(rng.random() * first.output_tokens))
        drawn.append(replace(session, turns=(replace(first, output_tokens=left),)))
    return drawn


def closed_loop(shape: Shape, seed: int, sessions: int) -> list[Session]:
    """Sessions for a fixed number of users, each sent when a user is free."""
    if sessions < 1:
        raise WorkloadError(f"{sessions} requests: at least 1")
    rng = random.Random(f"{seed}/shapes")
    return [shape.draw(rng, 0.0) for _ in range(sessions)]


def read_trace(path: Path, *, time_scale: float = 1.0, limit: int | None = None) -> list[Session]:
    """Replay of a JSONL trace, one request per line, the first at second 0.

    Keys: ``timestamp_s`` (seconds) or ``timestamp`` (milliseconds); ``input_length`` and ``output_length`` in
    tokens; optional ``hash_ids``, one per 512 prompt tokens, equal where prompts are equal. ``time_scale`` 2
    replays at half the speed.

    Raises:
        WorkloadError: the file cannot be read or a line is not such a request; names the line.
    """
    if time_scale <= 0:
        raise WorkloadError(f"time scale {time_scale}: must be positive")
    entries = []
    try:
        with path.open() as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    entries.append(_trace_entry(line, f"{path}:{number}", number))
                if limit is not None and len(entries) >= limit:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"trace {path}: {error}") from error
    if not entries:
        raise WorkloadError(f"trace {path}: no requests")
    entries.sort(key=lambda entry: entry[0])
    first = entries[0][0]
    return [Session((time - first) * time_scale, (turn,)) for time, turn in entries]


def _trace_entry(line: str, where: str, number: int) -> tuple[float, Turn]:
    try:
        entry = json.loads(line)
        time = float(entry["timestamp_s"]) if "timestamp_s" in entry else float(entry["timestamp"]) / 1e3
        tokens, output = int(entry["input_length"]), int(entry["output_length"])
        hashes = [int(each) for each in entry.get("hash_ids", [])]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WorkloadError(f"{where}: {type(error).__name__}: {error}") from error
    if tokens < 1 or output < 1 or not math.isfinite(time):
        raise WorkloadError(f"{where}: lengths are at least 1 and times finite")
    return time, Turn(tuple(_trace_segments(tokens, hashes, number)), output)


def _trace_segments(tokens: int, hashes: list[int], number: int) -> Iterator[Segment]:
    for each in hashes:
        if tokens <= 0:
            return
        yield Segment(each, min(TRACE_BLOCK_TOKENS, tokens))
        tokens -= TRACE_BLOCK_TOKENS
    if tokens > 0:
        yield Segment(-number, tokens)
