"""What a run showed: its figures as JSON, its course as a picture, and the reasons for which it failed."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from chaos_clients import Tally
from chaos_plan import (
    CONTROL_CUT,
    CUT,
    KILL,
    LONG_CUT,
    LONG_STOP,
    SHORT_STOP,
    STALE_WRITER,
    TABLES,
    Record,
)

MOST_GROWTH_BYTES = 96 * 1024 * 1024
MOST_CREEP_BYTES = 24 * 1024 * 1024
MOST_NEW_DESCRIPTORS = 24
MOST_TIED, FEW_TIED = 0.01, 8
"""Share of answers that may leave the undisturbed one at a tie, or as many as one case has in a short run."""
LEAST = {"kills": 20, "stops longer than the lease": 10, "cuts": 10, "cuts from the supervisor": 1}
"""In a run of full length."""
COLOURS = {
    KILL: "tab:red",
    LONG_STOP: "tab:purple",
    SHORT_STOP: "tab:pink",
    CUT: "tab:orange",
    LONG_CUT: "tab:brown",
    CONTROL_CUT: "tab:olive",
    STALE_WRITER: "tab:blue",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process uses."""

    pid: int
    resident_bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class Sample:
    """All processes at one time."""

    at_s: float
    usage: Mapping[str, Usage]


async def sample(actors: Mapping[str, Any], began: float) -> Sample:
    """Ask the system about every process of the deployment and about the supervisor."""
    usage = {"supervisor": _usage(psutil.Process())}
    for name, actor in actors.items():
        try:
            usage[name] = _usage(psutil.Process(await actor.known_pid()))
        except Exception:  # it is dead, stopped or not there yet
            continue
    return Sample(time.monotonic() - began, usage)


def _usage(process: psutil.Process) -> Usage:
    return Usage(process.pid, process.memory_info().rss, process.num_fds())


@dataclass(frozen=True, slots=True)
class Report:
    """One run."""

    options: argparse.Namespace
    tally: Tally
    record: Record
    before: Sample
    after: Sample
    samples: list[Sample]
    held: dict[str, int]
    began: float
    load_began_s: float
    load_ended_s: float

    def failures(self) -> list[str]:
        """Why the run does not pass; empty when it does."""
        tally = self.tally
        found = [f"wrong answer: {wrong}" for wrong in tally.wrong]
        found += [f"failed: {what}" for what in tally.unexpected]
        if tally.outcomes["hanging"] or tally.in_flight:
            found.append(f"{tally.outcomes['hanging']} requests hung, {tally.in_flight} are open")
        ended = sum(tally.outcomes.values())
        if tally.outcomes["tied"] > max(MOST_TIED * ended, FEW_TIED):
            found.append(f"{tally.outcomes['tied']} answers differ where two tokens were equally likely")
        if ended < self.options.requests and not self.options.unfenced:
            found.append(f"only {ended} requests ended")
        found += self.record.broken_promises
        found += [f"held at the end: {what} = {count}" for what, count in self.held.items()]
        found += self._creep() if self.options.soak else self._growth()
        if self.options.scale >= 1 and not self.options.unfenced:  # that one ends as soon as it has shown it
            found += [
                f"{what}: {self.counts()[what]} < {least}"
                for what, least in LEAST.items()
                if self.counts()[what] < least
            ]
            found += [
                f"no fault hit a request in '{state}'" for state, hits in self.states().items() if not hits
            ]
        return found

    def counts(self) -> dict[str, int]:
        """Faults by what the run must have seen of them."""
        record = self.record
        return {
            "kills": record.count(KILL),
            "stops longer than the lease": record.count(LONG_STOP),
            "shorter stops": record.count(SHORT_STOP),
            "stops of a writer with a write due": record.count(STALE_WRITER),
            "cuts": record.count(CUT) + record.count(LONG_CUT),
            "of them longer than the lease": record.count(LONG_CUT),
            "cuts from the supervisor": record.count(CONTROL_CUT),
        }

    def states(self) -> dict[str, dict[str, int]]:
        """Role and state -> kind of fault -> how often it struck as a request entered the state."""
        return {
            f"{role}: {state}": {
                kind: n
                for (where, kind), n in sorted(self.record.hits.items())
                if where == f"{role}: {state}"
            }
            for role, states in TABLES.items()
            for state in states
        }

    def _growth(self) -> list[str]:
        found = []
        for name, then in self.before.usage.items():
            now = self.after.usage.get(name)
            if now is None:
                found.append(f"{name} is not there at the end")
                continue
            if now.resident_bytes - then.resident_bytes > MOST_GROWTH_BYTES:
                found.append(
                    f"{name} grew from {then.resident_bytes >> 20} to {now.resident_bytes >> 20} MiB"
                )
            if now.descriptors - then.descriptors > MOST_NEW_DESCRIPTORS:
                found.append(f"{name} went from {then.descriptors} to {now.descriptors} file descriptors")
        return found

    def _creep(self) -> list[str]:
        """Processes that use more at the end of the load than after its beginning."""
        found = []
        for name, (first, last, most) in self.resident().items():
            if last - first > MOST_CREEP_BYTES:
                found.append(f"{name} grew from {first >> 20} to {last >> 20} MiB, at most {most >> 20}")
        return found

    def resident(self) -> dict[str, tuple[int, int, int]]:
        """Process -> median resident bytes in the second and the last tenth of the load, and the most."""
        loaded = [s for s in self.samples if self.load_began_s <= s.at_s <= self.load_ended_s]
        tenth = max(len(loaded) // 10, 1)
        figures = {}
        for name in self.before.usage:
            series = [s.usage[name].resident_bytes if name in s.usage else 0 for s in loaded]
            early, late = series[tenth : 2 * tenth] or series, series[-tenth:]
            figures[name] = (
                int(statistics.median(early)),
                int(statistics.median(late)),
                max(series),
            )
        return figures

    def document(self) -> dict[str, Any]:
        """Everything, for JSON."""
        tally, seconds = self.tally, sorted(self.tally.seconds)
        quantiles = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else []
        return {
            "seed": self.options.seed,
            "requests": sum(tally.outcomes.values()),
            "clients": self.options.clients,
            "fenced": not self.options.unfenced,
            "passed": not self.failures(),
            "failures": self.failures(),
            "load_s": round(self.load_ended_s - self.load_began_s, 1),
            "outcomes": dict(tally.outcomes),
            "refused_and_sent_again": dict(tally.refusals),
            "connections_broken": tally.broken,
            "seconds_to_answer": {f"p{p}": round(quantiles[p - 1], 3) for p in (50, 90, 99) if quantiles},
            "faults": self.counts(),
            "states_hit": self.states(),
            "held_at_the_end": self.held,
            "requests_per_s": round(
                sum(tally.outcomes.values()) / (self.load_ended_s - self.load_began_s), 2
            ),
            "resident_bytes": {
                name: {"early": first, "late": last, "most": most}
                for name, (first, last, most) in self.resident().items()
            },
            "before": asdict(self.before),
            "after": asdict(self.after),
            "timeline": [asdict(one) for one in self.record.struck],
        }

    def summary(self) -> str:
        """For people."""
        document = self.document()
        keys = (
            "seed",
            "requests",
            "fenced",
            "load_s",
            "outcomes",
            "refused_and_sent_again",
            "connections_broken",
        )
        lines = [
            f"{key}: {document[key]}"
            for key in (*keys, "seconds_to_answer", "requests_per_s", "faults", "held_at_the_end")
        ]
        missed = [state for state, hits in self.states().items() if not hits]
        lines.append(
            f"states hit: {len(self.states()) - len(missed)} of {len(self.states())}, missed: {missed}"
        )
        failures = self.failures()
        lines += [f"FAILED: {failure[:300]}" for failure in failures[:20]]
        lines.append(f"{len(failures)} failures" if failures else "PASSED")
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """``chaos.json`` and ``chaos.png``."""
        name = "soak" if self.options.soak else "chaos-unfenced" if self.options.unfenced else "chaos"
        (folder / f"{name}.json").write_text(json.dumps(self.document(), indent=1) + "\n")
        self._draw(folder / f"{name}.png")

    def _draw(self, file: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, (bars, rate, memory) = pyplot.subplots(
            3, 1, figsize=(14, 9), sharex=True, height_ratios=(3, 2, 2), layout="constrained"
        )
        victims = sorted({one.victim for one in self.record.struck})
        for one in self.record.struck:
            width = max(one.ended_s - one.began_s, 0.6)
            bars.barh(victims.index(one.victim), width, left=one.began_s, color=COLOURS[one.kind], alpha=0.8)
        bars.set_yticks(range(len(victims)), victims)
        for kind, colour in COLOURS.items():
            bars.barh(0, 0, color=colour, label=kind)
        bars.legend(loc="upper right", ncols=len(COLOURS), fontsize="small")
        bars.set_title(f"seed {self.options.seed}: {sum(self.tally.outcomes.values())} requests")
        ended = Counter((int(at - self.began) // 2 * 2, outcome) for at, outcome in self.tally.ended_at)
        for outcome in sorted(self.tally.outcomes):
            points = sorted((at, n / 2) for (at, what), n in ended.items() if what == outcome)
            rate.plot([at for at, _ in points], [n for _, n in points], label=outcome)
        rate.set_ylabel("requests ended per s")
        rate.legend(loc="upper right", fontsize="small")
        for name in self.before.usage:
            points = [(s.at_s, s.usage[name].resident_bytes / 2**20) for s in self.samples if name in s.usage]
            memory.plot([at for at, _ in points], [mb for _, mb in points], ".", markersize=2, label=name)
        memory.set_ylabel("resident MiB")
        memory.set_xlabel("s")
        memory.legend(loc="upper right", fontsize="small", ncols=4)
        figure.savefig(file, dpi=80)
        pyplot.close(figure)
