"""Wheels for the machine: fetched here, and those that are mostly what nothing loads made smaller."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from packaging.utils import parse_wheel_filename

from antiphon.benchmarks.bundle.needs import normal
from antiphon.protocol.errors import AntiphonError

PYTHON = "3.12"
GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 25, 24, 17)
"""Of the ``manylinux_2_N`` tags that are asked for: pip takes each by its exact name."""
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)


class BundleError(AntiphonError):
    """A bundle cannot be made, or is not whole; the message says what is wrong and where."""


def download_command(folder: Path, pins: Sequence[str]) -> list[str]:
    """How pip fetches wheels of the machine's Python, whatever this one is."""
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"),
        *platforms,
        *("--dest", str(folder), *pins),
    ]


def fetch(versions: Mapping[str, str], cache: Path) -> dict[str, Path]:
    """Distribution -> its wheel in ``cache``; only what is not there yet is asked for.

    Raises:
        BundleError: pip found no wheel for this Python and platform; its last line says which.
    """
    cache.mkdir(parents=True, exist_ok=True)
    missing = sorted(versions.keys() - _there(versions, cache).keys())
    if missing:
        pins = [f"{name}=={versions[name]}" for name in missing]
        done = subprocess.run(download_command(cache, pins), capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["pip failed"]
            raise BundleError(f"wheels for Python {PYTHON}: {lines[-1]}")
    there = _there(versions, cache)
    if still := sorted(versions.keys() - there.keys()):
        raise BundleError(f"{cache}: no wheel of {', '.join(still)} after pip fetched it")
    return there


def _there(versions: Mapping[str, str], cache: Path) -> dict[str, Path]:
    found = {}
    for path in cache.glob("*.whl"):
        name, version, *_ = parse_wheel_filename(path.name)
        if versions.get(normal(name)) == str(version):
            found[normal(name)] = path
    return found


def without(wheel: Path, folders: Collection[str], target: Path) -> Path:
    """A wheel of the same name in the folder ``target`` that lacks whole folders, in its RECORD too.

    Raises:
        BundleError: a folder is not in the wheel, so the list of what to leave out is stale.
    """
    target.mkdir(parents=True, exist_ok=True)
    slim = target / wheel.name
    partial = slim.with_suffix(".partial")
    prefixes, seen = tuple(folders), set[str]()
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as kept:
        for entry in source.infolist():
            dropped = next((prefix for prefix in prefixes if entry.filename.startswith(prefix)), None)
            if dropped is not None:
                seen.add(dropped)
            elif _is_record(entry.filename):
                kept.writestr(entry, _record_without(source.read(entry).decode(), prefixes))
            else:
                kept.writestr(entry, source.read(entry), zipfile.ZIP_DEFLATED)
    if absent := sorted(set(prefixes) - seen):
        partial.unlink()
        raise BundleError(f"{wheel.name}: has no {', '.join(absent)}")
    partial.rename(slim)
    return slim


def _is_record(name: str) -> bool:
    """Whether it is the wheel's own, and not of a package that lies inside it."""
    return name.count("/") == 1 and name.endswith(".dist-info/RECORD")


def _record_without(record: str, prefixes: tuple[str, ...]) -> str:
    kept = io.StringIO()
    rows = [row for row in csv.reader(io.StringIO(record)) if row and not row[0].startswith(prefixes)]
    csv.writer(kept, lineterminator="\n").writerows(rows)
    return kept.getvalue()


def record_faults(wheel: Path) -> list[str]:
    """What of a wheel's RECORD is not so: files that are not there, not listed, or of another hash."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if not name.endswith("/")}
        record = next(name for name in files if _is_record(name))
        rows = [row for row in csv.reader(io.StringIO(archive.read(record).decode())) if row]
        listed = {row[0]: row[1] for row in rows}
        faults = [f"{name}: not there" for name in sorted(listed.keys() - files)]
        faults += [f"{name}: not listed" for name in sorted(files - listed.keys())]
        for name, said in listed.items():
            algorithm, _, digest = said.partition("=")
            if name in files and digest and _digest(archive.read(name), algorithm) != digest:
                faults.append(f"{name}: another {algorithm}")
    return faults


def _digest(content: bytes, algorithm: str) -> str:
    return base64.urlsafe_b64encode(hashlib.new(algorithm, content).digest()).rstrip(b"=").decode()
