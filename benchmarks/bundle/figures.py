"""A short table of the figures that a run left in a folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from antiphon.benchmarks.records import Record, read_json

MOST = 60
"""Lines; whatever is more stays in the files."""


def records_in(folder: Path, since: str) -> Iterator[Record]:
    """Those of every JSON file, no older than a time as records write it.

    Raises:
        RecordError: a file is no JSON, or has an entry with a layout and a value that is no record.
    """
    for path in sorted(folder.glob("*.json")):
        entries = read_json(path)
        if not isinstance(entries, list):
            continue
        for index, entry in enumerate(entries):
            if isinstance(entry, dict) and {"layout", "value"} <= entry.keys():
                record = Record.from_json(entry, f"{path}, entry {index}")
                if record.date >= since:
                    yield record


def line(record: Record) -> str:
    """What was measured, the figure, and what it cannot be below."""
    point = {"input": record.input_tokens, "batch": record.batch, "context": record.context}
    words = [record.bench, record.model, record.layout]
    words += [f"{name} {value}" for name, value in point.items() if value is not None]
    words += [str(word) for word in (record.kernel, record.extra.get("choices"), record.peer) if word]
    floor = "" if record.floor is None else f"  floor {record.floor:.3f}"
    beside = "" if record.beside is None else f"  {record.beside.system} {record.beside.value:.3f}"
    return f"{', '.join(words):78s} {record.value:10.3f} {record.unit}{floor}{beside}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--since", default="", help="leave out what is older, such as 2026-01-31T12:00:00")
    options = parser.parse_args(arguments)
    lines = [line(record) for record in records_in(options.folder, options.since)]
    for each in lines[:MOST]:
        print(each)
    if len(lines) > MOST:
        print(f"and {len(lines) - MOST} more in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
