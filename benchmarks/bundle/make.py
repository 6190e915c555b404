"""Makes a bundle: gathers its files, lays them into parts of a bounded size, and writes what it holds."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from antiphon.benchmarks.bundle.kinds import LEFT_OUT, packages_of, scripts_of
from antiphon.benchmarks.bundle.manifest import (
    Item,
    Manifest,
    PeerTree,
    part_folder,
    sha256_of,
    sources_digest,
)
from antiphon.benchmarks.bundle.needs import ROOT, locked
from antiphon.benchmarks.bundle.wheels import PYTHON, BundleError, fetch, without
from antiphon.benchmarks.records import checkout_commit, now

LOCK = ROOT / "requirements/lock.txt"
TOOLS = tuple(ROOT / "requirements" / name for name in ("clients.txt", "sanitizer.txt"))
"""Versions of what no worker needs."""
CACHE = ROOT / ".cache/bundle"
"""Wheels of earlier bundles: nothing is fetched twice."""
SCRIPTS = Path(__file__).parent / "scripts"
ALWAYS = ("setup.sh", "steps.sh")


def make(kind: str, out: Path, part_mib: float, cache: Path, peer_tree: Path | None = None) -> Manifest:
    """Write the bundle of a kind into a folder, replacing the one that is there.

    Raises:
        BundleError: the folder holds something else, a file does not fit into a part, a wheel is not to be
            had, a library cannot be compiled, or the peer's tree is not there.
    """
    if out.exists() and any(out.iterdir()) and not (out / "manifest.json").is_file():
        raise BundleError(f"{out}: is there, and is no bundle")
    tree = None if peer_tree is None else _tree(peer_tree)
    files = [*_wheels(kind, cache), *_libraries()]
    items = packed([item for item, _ in files], part_mib)
    sources = {item.file: source for item, source in files}
    shutil.rmtree(out, ignore_errors=True)
    for item in items:
        folder = out / part_folder(item.part)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sources[item.file], folder / item.file)
    for name in (*ALWAYS, *scripts_of(kind)):
        shutil.copy(SCRIPTS / name, out / name)
    manifest = Manifest(kind, checkout_commit(), sources_digest(ROOT), now(), PYTHON, tuple(items), tree)
    manifest.write(out)
    return manifest


def packed(items: Sequence[Item], part_mib: float) -> list[Item]:
    """The items with their parts: each, the largest first, into the first part that has room.

    Raises:
        BundleError: one is larger than a part.
    """
    limit, filled = part_mib * 2**20, list[int]()
    found = []
    for item in sorted(items, key=lambda item: (-item.size_bytes, item.file)):
        if item.size_bytes > limit:
            size = item.size_bytes / 2**20
            raise BundleError(f"{item.file} has {size:.1f} MiB and a part at most {part_mib:g}")
        room = (number for number, size in enumerate(filled) if size + item.size_bytes <= limit)
        number = next(room, len(filled))
        if number == len(filled):
            filled.append(0)
        filled[number] += item.size_bytes
        found.append(replace(item, part=number + 1))
    return found


def _wheels(kind: str, cache: Path) -> list[tuple[Item, Path]]:
    names = packages_of(kind)
    pins = {name: version for file in (*TOOLS, LOCK) for name, version in locked(file).items()}
    if unpinned := sorted(names - pins.keys()):
        raise BundleError(f"{LOCK} has no version of {', '.join(unpinned)}")
    found = []
    wheels = fetch({name: pins[name] for name in names}, cache / "wheels")
    for name, wheel in sorted(wheels.items()):
        left_out = LEFT_OUT.get(name, ())
        file = _slim(wheel, left_out, cache) if left_out else wheel
        found.append((_item("wheel", name, pins[name], file, left_out), file))
    return found


def _slim(wheel: Path, left_out: tuple[str, ...], cache: Path) -> Path:
    """The wheel without folders, made unless exactly these were left out before."""
    folder = cache / f"without-{hashlib.sha256(repr(left_out).encode()).hexdigest()[:12]}"
    file = folder / wheel.name
    return file if file.exists() else without(wheel, left_out, folder)


def _libraries() -> list[tuple[Item, Path]]:
    """The CUDA libraries, compiled unless those of exactly these sources are there."""
    from antiphon.cluster.cli_kernels import LIBRARIES, WATCHED
    from antiphon.kernels.cuda_library import KernelLibraryError

    libraries = (*LIBRARIES, *(library.for_racecheck() for library in WATCHED))
    try:
        paths = [library.build() for library in libraries]
    except KernelLibraryError as error:
        raise BundleError(str(error)) from error
    return [
        (_item("library", library.name, "", path), path)
        for library, path in zip(libraries, paths, strict=True)
    ]


def _item(what: str, name: str, version: str, file: Path, left_out: tuple[str, ...] = ()) -> Item:
    size = file.stat().st_size
    return Item(
        "wheel" if what == "wheel" else "library",
        name,
        version,
        file.name,
        0,
        size,
        sha256_of(file),
        left_out,
    )


def _tree(path: Path) -> PeerTree:
    if not path.exists():
        raise BundleError(f"{path}: no such tree of a peer")
    if path.is_dir() and not (path / "site").is_dir():
        raise BundleError(
            f"{path}: holds no site/, so it is no tree of a peer; an archive of one is named itself"
        )
    whole = path.resolve()
    shown = whole.relative_to(ROOT) if whole.is_relative_to(ROOT) else whole
    return PeerTree(str(shown), "" if path.is_dir() else sha256_of(path))
