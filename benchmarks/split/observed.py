"""What one load on one arrangement gave, and goodput from it: the raw form that is kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from antiphon.benchmarks import records
from antiphon.benchmarks.records import RecordError
from antiphon.benchmarks.serve.observation import Observation
from antiphon.benchmarks.serve.report import Document
from antiphon.benchmarks.split.arrangements import Arrangement
from antiphon.benchmarks.split.mixes import Mix


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One load; times in milliseconds, lists hold one value for each answered request of the window."""

    arrangement: str
    chunk_tokens: int | None
    model: str
    device: str
    gpus: int
    mix: str
    input_tokens: int
    output_tokens: int
    rate_per_s: float
    """Arrivals; Poisson, given that as many fall into the window as on average."""
    duration_s: float
    window_s: float
    """Time that the rates are of: the duration without its warm-up."""
    requests: int
    """Of the window, failed ones included."""
    failed: int
    ttft_ms: list[float]
    itl_p99_ms: list[float]
    """Of each request its own 99th percentile."""
    ttft_p50_p99_ms: tuple[float, float] | None
    itl_p50_p99_ms: tuple[float, float] | None
    """Over all gaps of all requests."""
    output_tokens_per_s: float
    peer: bool
    """Whether it is a server of somebody else."""
    commit: str
    date: str
    complaints: list[str] = field(default_factory=list)
    """Why the figures may be the load generator's."""
    standing: int = 0
    """Requests in service with which the load began."""
    settings: dict[str, object] = field(default_factory=dict)
    """Of the load and of what served it, see ``split.identity``."""

    @property
    def place(self) -> tuple[object, ...]:
        """What was measured: runs of one place are compared, so their settings are the same."""
        return (self.arrangement, self.chunk_tokens, self.model, self.device, self.gpus, self.mix)

    @property
    def whole_settings(self) -> dict[str, object]:
        """All that decides its figures besides place and rate."""
        return self.settings | {
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "duration_s": self.duration_s,
            "standing": self.standing,
        }

    @property
    def point(self) -> tuple[object, ...]:
        """What a repetition replaces."""
        return (*self.place, self.rate_per_s)

    def good(self, ttft_ms: float, itl_ms: float) -> int:
        """Requests that kept both limits."""
        pairs = zip(self.ttft_ms, self.itl_p99_ms, strict=True)
        return sum(ttft <= ttft_ms and itl <= itl_ms for ttft, itl in pairs)

    def share(self, ttft_ms: float, itl_ms: float) -> float:
        """Good requests over all requests of the window."""
        return self.good(ttft_ms, itl_ms) / self.requests if self.requests else 0.0

    @classmethod
    def from_json(cls, entry: object, where: str) -> Self:
        """A run of one JSON object.

        Raises:
            RecordError: it is none.
        """
        names = {each.name for each in fields(cls)}
        if not isinstance(entry, dict) or entry.keys() != names:
            raise RecordError(f"{where}: no run of a load")
        pairs = {
            name: None if entry[name] is None else (float(entry[name][0]), float(entry[name][1]))
            for name in ("ttft_p50_p99_ms", "itl_p50_p99_ms")
        }
        return cls(**(entry | pairs))


@dataclass(frozen=True, slots=True)
class Best:
    """The most good requests a second of an arrangement within limits, and the run that showed it."""

    good_per_s: float
    run: LoadRun


def best_within(runs: Iterable[LoadRun], ttft_ms: float, itl_ms: float, attainment: float) -> Best | None:
    """The run with most good requests a second among those that serve ``attainment`` of requests well."""
    found: Best | None = None
    for run in runs:
        good = run.good(ttft_ms, itl_ms) / run.window_s
        if run.share(ttft_ms, itl_ms) >= attainment and (found is None or good > found.good_per_s):
            found = Best(good, run)
    return found


@dataclass(frozen=True, slots=True)
class Point:
    """What is put on what."""

    arrangement: Arrangement
    model: str
    device: str
    mix: Mix
    rate_per_s: float
    duration_s: float
    standing: int = 0
    settings: dict[str, object] = field(default_factory=dict)


def observed(point: Point, measured: Sequence[Observation], document: Document) -> LoadRun:
    """The raw form of one run of the load generator."""
    arrangement, mix = point.arrangement, point.mix
    answered = [each for each in measured if each.ok]
    return LoadRun(
        arrangement=arrangement.name,
        chunk_tokens=arrangement.chunk_tokens,
        model=point.model,
        device=point.device,
        gpus=arrangement.gpus,
        mix=mix.name,
        input_tokens=mix.input_tokens,
        output_tokens=mix.output_tokens,
        rate_per_s=point.rate_per_s,
        duration_s=point.duration_s,
        window_s=document["window_s"],
        requests=len(measured),
        failed=len(measured) - len(answered),
        ttft_ms=[round(each.ttft_s * 1e3, 2) for each in answered],
        itl_p99_ms=[round((each.itl_p99_s or 0.0) * 1e3, 3) for each in answered],
        ttft_p50_p99_ms=_pair(document["latency_s"]["ttft"]),
        itl_p50_p99_ms=_pair(document["latency_s"]["itl"]),
        output_tokens_per_s=round(document["rates"]["output_tokens_per_s"], 2),
        peer=arrangement.config is None,
        commit=document["commit"],
        date=document["date"],
        complaints=list(document["generator_health"]["complaints"]),
        standing=point.standing,
        settings=point.settings,
    )


def load_runs(path: Path) -> list[LoadRun]:
    """The runs of a file; [] when it does not exist.

    Raises:
        RecordError: it is no file of such runs.
    """
    if not path.exists():
        return []
    document = records.read_json(path)
    if not isinstance(document, dict) or document.get("bench") != "split":
        raise RecordError(f"{path}: holds no runs of a comparison")
    entries: list[Any] = document.get("runs", [])
    settings: list[Any] = document.get("settings", [])
    runs = []
    for index, entry in enumerate(entries):
        where = f"{path}, run {index}"
        try:
            whole = entry | {"settings": dict(settings[entry["settings"]])}
        except (TypeError, KeyError, IndexError) as error:
            raise RecordError(f"{where}: a run without its settings, of before they were kept") from error
        runs.append(LoadRun.from_json(whole, where))
    return runs


def append_run(path: Path, run: LoadRun, *, anew: bool = False) -> None:
    """Keep a run, in place of an earlier one of the same point.

    Args:
        anew: in place of all runs of the same place.
    """
    kept = [each for each in load_runs(path) if not (anew and each.place == run.place)]
    merged = {each.point: each for each in kept} | {run.point: run}
    settings: list[dict[str, object]] = []  # the same for many runs, so they are written once
    entries = []
    for each in merged.values():
        if each.settings not in settings:
            settings.append(each.settings)
        entries.append(asdict(each) | {"settings": settings.index(each.settings)})
    records.write_json(path, {"bench": "split", "settings": settings, "runs": entries})


def _pair(summary: dict[str, float | None]) -> tuple[float, float] | None:
    p50, p99 = summary["p50"], summary["p99"]
    return None if p50 is None or p99 is None else (round(p50 * 1e3, 3), round(p99 * 1e3, 3))
