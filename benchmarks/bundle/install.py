"""Installs a bundle on the machine it was made for, with nothing but Python: no pip, no network.

Parts may come one after the other: what an earlier call installed is kept as long as the manifest names the
same file, and replaced when it names another. Run by the bundle's ``setup.sh``.

    python3 -m antiphon.benchmarks.bundle.install BUNDLE --into FOLDER [--whole]
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shlex
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from antiphon.benchmarks.bundle.manifest import Item, Manifest, PeerTree, part_folder, sha256_of

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("torch", "triton", "numpy", "pytest")
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Multicast between GPUs needs rights that few machines give."""
PEER_ENVIRONMENT = {
    **NO_MULTICAST,
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Nothing of the peer's asks a network, or compiles against packages that its tree lacks."""
_RECORDS = ".installed"


class InstallError(Exception):
    """The bundle cannot be installed; the message says what is wrong and where."""


class Target:
    """The folder that a bundle is installed into: packages in ``site``, compiled libraries in ``kernels``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.site, self.kernels = folder, folder / "site", folder / "kernels"
        for each in (self.site, self.kernels, folder / _RECORDS):
            each.mkdir(parents=True, exist_ok=True)

    def _record(self, item: Item) -> Path:
        return self.folder / _RECORDS / f"{item.what}-{item.name}.json"

    def has(self, item: Item) -> bool:
        """Whether exactly this file was installed whole."""
        record = self._record(item)
        return record.exists() and json.loads(record.read_text())["sha256"] == item.sha256

    def install(self, item: Item, file: Path) -> None:
        """Unpack a wheel or lay a library, after what an older one of its name had is removed.

        Raises:
            InstallError: the file is not what the manifest says.
        """
        if sha256_of(file) != item.sha256:
            raise InstallError(f"{file}: damaged, its sha256 is not the manifest's")
        record = self._record(item)
        if record.exists():
            for name in json.loads(record.read_text())["files"]:
                (self.folder / name).unlink(missing_ok=True)
            record.unlink()
        laid = list(self._unpack(file)) if item.what == "wheel" else [self._lay(file)]
        names = [str(path.relative_to(self.folder)) for path in laid]
        record.write_text(json.dumps({"sha256": item.sha256, "version": item.version, "files": names}))

    def _lay(self, file: Path) -> Path:
        return Path(shutil.copy(file, self.kernels / file.name))

    def _unpack(self, wheel: Path) -> Iterator[Path]:
        """Every file that imports may find; scripts and headers are left out."""
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                inside = _place(entry.filename)
                if entry.is_dir() or inside is None:
                    continue
                path = self.site.joinpath(*inside.parts)
                if not path.resolve().is_relative_to(self.site.resolve()):
                    raise InstallError(f"{wheel}: {entry.filename} lies outside of it")
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(entry) as source, path.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                mode = entry.external_attr >> 16 & 0o777
                path.chmod(mode | 0o644 if mode else 0o644)  # Ray starts programs that lie in its wheel
                yield path


def _place(name: str) -> PurePosixPath | None:
    """Where a wheel's file goes, relative to the packages' folder; None when nothing imports it."""
    path = PurePosixPath(name)
    if not path.parts[0].endswith(".data"):
        return path
    return PurePosixPath(*path.parts[2:]) if path.parts[1] in ("purelib", "platlib") else None


def refuse_another_machine(manifest: Manifest) -> None:
    """Say at once what this machine lacks.

    Raises:
        InstallError: another Python than the wheels are for, or one of what bundles build on is missing.
    """
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here != manifest.python:
        raise InstallError(f"the bundle is for Python {manifest.python}, and {sys.executable} is {here}")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise InstallError(f"{sys.executable} has no {', '.join(missing)}, which no bundle brings")


def install_parts(bundle: Path, manifest: Manifest, target: Target) -> list[Item]:
    """Install what is here and was not before; returns what is still to come.

    Raises:
        InstallError: a file is damaged.
    """
    to_come = []
    for item in manifest.items:
        file = bundle / part_folder(item.part) / item.file
        if target.has(item):
            continue
        if file.exists():
            target.install(item, file)
        else:
            to_come.append(item)
    return to_come


def lay_peer(tree: PeerTree, target: Target) -> None:
    """Unpack another system's tree once, and write ``peer-python``: an interpreter that finds it alone.

    Raises:
        InstallError: the tree is not there, is another one, or holds no ``site/``.
    """
    source = Path(os.environ.get("PEER_TREE") or tree.path)
    source = source if source.is_absolute() else ROOT / source
    folder = source
    if not source.exists():
        raise InstallError(f"{source}: the peer's tree is not here; PEER_TREE= says where it is")
    if not source.is_dir():
        if sha256_of(source) != tree.sha256:
            raise InstallError(f"{source}: damaged, or another tree than the bundle was made with")
        folder = target.folder / f"peer-{tree.sha256[:12]}"
        if not folder.exists():
            partial = target.folder / "peer.partial"
            shutil.rmtree(partial, ignore_errors=True)
            with tarfile.open(source) as archive:
                archive.extractall(partial, filter="data")
            compileall.compile_dir(partial, quiet=2, workers=0)
            partial.rename(folder)
    if not (folder / "site").is_dir():
        raise InstallError(f"{source}: holds no site/")
    variables = {**PEER_ENVIRONMENT, "PYTHONPATH": str(folder / "site")}
    if (folder / "cache").is_dir():
        variables["VLLM_CACHE_ROOT"] = str(folder / "cache")
    lines = ["#!/bin/sh", *(f"export {name}={shlex.quote(value)}" for name, value in variables.items())]
    program = target.folder / "peer-python"
    program.write_text("\n".join([*lines, f'exec {shlex.quote(sys.executable)} "$@"', ""]))
    program.chmod(0o755)


def write_environment(manifest: Manifest, target: Target) -> None:
    """``env.sh``, which programs are run under."""
    path = f"{ROOT / 'src'}:{target.site}"
    lines = (
        f'export PYTHONPATH={shlex.quote(path)}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        f"export ANTIPHON_KERNEL_LIBRARY_DIR={shlex.quote(str(target.kernels))}",
        f'export ANTIPHON_COMMIT="${{ANTIPHON_COMMIT:-{manifest.commit_of(ROOT)}}}"',
        f"export BUNDLE_TARGET={shlex.quote(str(target.folder))}",
        *(f"export {name}={value}" for name, value in NO_MULTICAST.items()),
        "export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1",
    )
    (target.folder / "env.sh").write_text("\n".join(lines) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Install; 0 when nothing is wrong and, with ``--whole``, nothing is to come."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--into", type=Path, required=True, help="folder of packages and libraries")
    parser.add_argument("--whole", action="store_true", help="fail while parts are to come")
    options = parser.parse_args(arguments)
    try:
        manifest = Manifest.read(options.bundle)
        refuse_another_machine(manifest)
        target = Target(options.into.resolve())
        to_come = install_parts(options.bundle, manifest, target)
        if manifest.peer_tree is not None:
            lay_peer(manifest.peer_tree, target)
        write_environment(manifest, target)
    except (InstallError, ValueError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    for part in sorted({item.part for item in to_come}):
        names = ", ".join(item.name for item in to_come if item.part == part)
        print(f"setup: {part_folder(part)} of {manifest.parts} is to come: {names}")
    installed = len(manifest.items) - len(to_come)
    print(f"setup: {installed} of {len(manifest.items)} files of {manifest.kind} are in {target.folder}")
    return 1 if to_come and options.whole else 0


if __name__ == "__main__":
    sys.exit(main())
