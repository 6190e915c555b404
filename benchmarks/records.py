"""The one form of a raw figure: a list of flat JSON objects per file under ``benchmarks/results/``.

Every record says what was measured (``bench``, ``model``, ``layout`` and the point), on what (``device``,
``commit``, ``date``), and the figure itself: ``value`` in ``unit``, the ``floor`` in the same unit, and
``peer``: the system's name and version when the figure is not ours; when it is, and that system was measured
at the same point in the same run, an object ``{system, value, date, layout}``. A file that is not a list of
such objects is another kind of result and is left to whoever wrote it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from antiphon.protocol.errors import AntiphonError

RESULTS = Path(__file__).resolve().parent / "results"

BENCH_PREFILL = "prefill"
"""One prompt of ``input_tokens`` through the model, ms."""
BENCH_DECODE = "decode_step"
"""One step of ``batch`` sequences of ``context`` tokens, ms."""
BENCH_KERNEL = "kernel"
"""One launch (or one layer's share) of a kernel, us."""

RESIDENT_FP8 = "mxfp4 and fp8"
"""``resident_weights`` of a worker that holds FP8 experts for prompts beside the 4-bit ones."""

_APPENDING = threading.Lock()
"""Threads that measure at the same time keep their figures in one file."""
_ALIASES = {"decode": BENCH_DECODE, "engine_decode": BENCH_DECODE, "engine_prefill": BENCH_PREFILL}


class RecordError(AntiphonError):
    """A file of results cannot be read or written; the message names the file and the entry."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one model is spread: ``tp`` attention ranks, ``ep`` expert ranks (1 or tp), ``dp`` replicas."""

    tp: int = 1
    ep: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        if min(self.tp, self.ep, self.dp) < 1 or self.ep not in (1, self.tp):
            raise RecordError(
                f"layout TP{self.tp} EP{self.ep} DP{self.dp}: EP is 1 or equal to TP, all at least 1"
            )

    @property
    def gpus(self) -> int:
        """GPUs that all replicas take."""
        return self.tp * self.dp

    @property
    def name(self) -> str:
        """Such as ``TP4 EP4`` or ``TP1 DP2``; the parts that are 1 are left out, TP never."""
        parts = [f"TP{self.tp}"]
        parts += [f"EP{self.ep}"] if self.ep > 1 else []
        parts += [f"DP{self.dp}"] if self.dp > 1 else []
        return " ".join(parts)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``TP2``, ``tp2``, ``TP4 EP4``, ``EP4 TP4``, ``TP1 DP2`` or ``1 GPU``.

        Raises:
            RecordError: another text.
        """
        lowered = text.strip().lower()
        if lowered == "1 gpu":
            return cls()
        found = re.findall(r"(tp|ep|dp)[ =]?(\d+)", lowered)
        if not found or re.sub(r"(tp|ep|dp)[ =]?\d+|[ ,+x/-]", "", lowered):
            raise RecordError(f"layout {text!r}: expected such as 'TP4 EP4' or 'TP1 DP2'")
        sizes = {name: int(size) for name, size in found}
        return cls(**sizes)


@dataclass(frozen=True, slots=True)
class PeerFigure:
    """What another system reached at the same point, on the same machine, in the same run."""

    system: str
    """Name and version."""
    value: float
    """In the unit of the record that it belongs to."""
    date: str
    layout: str
    """Over as many GPUs as the record's."""

    @classmethod
    def from_json(cls, entry: dict[str, object]) -> Self:
        """Of a record's ``peer`` object.

        Raises:
            KeyError, TypeError: it is none.
        """
        layout = Layout.parse(str(entry["layout"])).name
        return cls(str(entry["system"]), _number(entry["value"]), str(entry["date"]), layout)


@dataclass(frozen=True, slots=True)
class Record:
    """One measured figure."""

    bench: str
    model: str
    layout: str
    device: str
    commit: str
    """Of this project; of a peer's figure, the peer's name and version."""
    date: str
    value: float
    unit: str
    batch: int | None = None
    input_tokens: int | None = None
    context: int | None = None
    floor: float | None = None
    """Lowest possible value by operations and bytes, in ``unit``."""
    peer: str | None = None
    """Name and version of the system that the figure is of; None is this project."""
    beside: PeerFigure | None = None
    """A figure of this project: that of another system in the same run. In JSON, ``peer`` as an object."""
    kernel: str | None = None
    extra: dict[str, object] = field(default_factory=dict)
    """Everything else that the file says about the figure."""

    @classmethod
    def from_json(cls, entry: dict[str, object], where: str) -> Self:
        """A record of one JSON object; ``where`` names it in errors.

        Raises:
            RecordError: a required key is missing or of a wrong type.
        """
        try:
            value = entry["value"]
            bench = str(entry["bench"])
            floor, peer = entry.get("floor"), entry.get("peer")
            return cls(
                bench=_ALIASES.get(bench, bench),
                model=_model_name(str(entry.get("model", ""))),
                layout=Layout.parse(str(entry["layout"])).name,
                device=str(entry["device"]),
                commit=str(entry["commit"]),
                date=str(entry["date"]),
                value=_number(value),
                unit=str(entry["unit"]),
                batch=_count(entry.get("batch")),
                input_tokens=_count(entry.get("input_tokens")),
                context=_count(entry.get("context")),
                floor=None if floor is None else _number(floor),
                peer=None if peer is None or isinstance(peer, dict) else str(peer),
                beside=PeerFigure.from_json(peer) if isinstance(peer, dict) else None,
                kernel=None if entry.get("kernel") is None else str(entry["kernel"]),
                extra={key: item for key, item in entry.items() if key not in _KNOWN},
            )
        except KeyError as error:
            raise RecordError(f"{where}: no key {error}") from error
        except (TypeError, ValueError, RecordError) as error:
            raise RecordError(f"{where}: {error}") from error

    def to_json(self) -> dict[str, object]:
        """The flat object; keys that mean nothing here are left out, ``floor`` and ``peer`` never."""
        entry: dict[str, object] = asdict(self)
        del entry["extra"]
        entry["peer"] = entry.pop("beside") or self.peer
        optional = ("batch", "input_tokens", "context", "kernel")
        return {
            key: item for key, item in entry.items() if item is not None or key not in optional
        } | self.extra

    @property
    def choices(self) -> str:
        """What the model was told to do otherwise than by default, where that is more than to hold FP8."""
        return str(self.extra.get("choices") or "")

    @property
    def holds_fp8(self) -> bool:
        """Whether FP8 experts lay beside the 4-bit ones, as they do where a worker is told so."""
        return self.extra.get("resident_weights") == RESIDENT_FP8

    @property
    def is_default(self) -> bool:
        """Whether workers compute this way unless they are asked for another one."""
        return not self.choices and not self.holds_fp8

    @property
    def point(self) -> tuple[object, ...]:
        """What makes two records figures of the same thing; a later one replaces an earlier one."""
        return (
            self.bench,
            self.model,
            self.layout,
            self.device,
            self.kernel,
            self.batch,
            self.input_tokens,
            self.context,
            self.peer,
            self.extra.get("resident_weights"),
            self.extra.get("shape"),
            self.extra.get("choices"),
        )


_KNOWN = frozenset(each.name for each in fields(Record)) - {"extra", "beside"}


def load_records(path: Path) -> list[Record]:
    """The records of one file, [] when it does not exist.

    Raises:
        RecordError: the file is no list of records.
    """
    if not path.exists():
        return []
    entries = read_json(path)
    if not isinstance(entries, list):
        raise RecordError(f"{path}: not a list of records")
    return [Record.from_json(entry, f"{path}, entry {i}") for i, entry in enumerate(entries)]


def load_results(folder: Path = RESULTS) -> list[Record]:
    """Records of every file in ``folder`` that holds records; of one point the latest date wins.

    Raises:
        RecordError: there is no such folder, a file is no JSON, or a list has an entry which is no record.
    """
    if not folder.is_dir():
        raise RecordError(f"{folder}: no such folder of results")
    latest: dict[tuple[object, ...], Record] = {}
    for path in sorted(folder.glob("*.json")):
        entries = read_json(path)
        if not isinstance(entries, list):
            continue
        for index, entry in enumerate(entries):
            if not isinstance(entry, dict):
                raise RecordError(f"{path}, entry {index}: not an object")
            if not {"layout", "value"} <= entry.keys():
                continue
            record = Record.from_json(entry, f"{path}, entry {index}")
            known = latest.get(record.point)
            if known is None or known.date <= record.date:
                latest[record.point] = record
    return list(latest.values())


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Add records to a file, replacing those of the same points; a crash leaves the old file or the new one.

    Raises:
        RecordError: what is there is no list of records.
    """
    with _APPENDING:
        merged = {record.point: record for record in load_records(path)}
        merged.update((record.point, record) for record in records)
        write_json(path, [record.to_json() for record in merged.values()])


def write_json(path: Path, document: object) -> None:
    """Write a JSON file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(document, file, indent=1)
            file.write("\n")
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def checkout_commit() -> str:
    """What ``ANTIPHON_COMMIT`` says; else the commit of this checkout, with ``+changes`` when files differ.

    The variable is for a machine that only the files were copied to, whose git folder, where it has one, may
    be another commit's. Neither: ``unknown``.
    """
    said = os.environ.get("ANTIPHON_COMMIT")
    if said:
        return said
    folder = Path(__file__).resolve().parent
    try:
        head = _git(folder, ["rev-parse", "HEAD"])
        dirty = _git(folder, ["status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if dirty else "")


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def this_machine() -> dict[str, object]:
    """Where a load was generated."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1m": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def select(records: Sequence[Record], bench: str, *, peer: str | None = None) -> list[Record]:
    """Records of one bench, of this project unless a peer is named."""
    return [record for record in records if record.bench == bench and record.peer == peer]


def read_json(path: Path) -> object:
    """Any JSON document.

    Raises:
        RecordError: the file cannot be read or is no JSON.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: {error}") from error


def _git(folder: Path, arguments: list[str]) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.strip()


def _model_name(text: str) -> str:
    return f"gpt-oss-{text}" if text in ("20b", "120b") else text


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _count(value: object) -> int | None:
    if value is None:
        return None
    number = _number(value)
    if number != int(number) or number < 0:
        raise TypeError(f"{value!r} is not a count")
    return int(number)
