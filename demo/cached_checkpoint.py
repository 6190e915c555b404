"""Where the demo model's checkpoint folder is: expanded from the packed file at first start, then kept."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from antiphon.demo.shape import MODEL_NAME
from antiphon.protocol.errors import CheckpointError

PACKED_FILE = Path(__file__).with_name(f"{MODEL_NAME}.bin.xz")
DIGEST_FILE = Path(__file__).with_name(f"{MODEL_NAME}.json")
"""``{"sha256": …}`` of the packed file."""
CACHE_VARIABLE = "ANTIPHON_CACHE_DIR"
_SUMS = "sha256.json"


def default_cache_dir() -> Path:
    """``$ANTIPHON_CACHE_DIR``, else ``antiphon`` in the user's cache folder (XDG).

    Raises:
        CheckpointError: nothing says where.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "antiphon"
    try:
        return Path.home() / ".cache" / "antiphon"
    except RuntimeError as error:
        raise CheckpointError(f"no home folder to keep models in: set {CACHE_VARIABLE}") from error


def ensure_demo_checkpoint(
    cache_dir: Path | None = None, packed: Path = PACKED_FILE, digest: str | None = None
) -> Path:
    """The folder of the expanded checkpoint (Hugging Face layout), made if it is not there or is damaged.

    The folder's name carries the packed file's sha256, so another version never meets an old folder, and
    every file in it is checked by its own sha256 each time. It is written beside its place and renamed, so an
    interruption leaves no half of one; of processes that start at once, one writes and the others wait.

    Args:
        cache_dir: where expanded checkpoints live, created if absent; ``default_cache_dir()`` when None.
        packed: the packed file.
        digest: its sha256 in hexadecimal; the one shipped beside the file when None.

    Raises:
        CheckpointError: the packed file is missing or is not the one that was shipped, or the cache cannot be
            written (no space, no permission); the message names the folder.
    """
    expected = _shipped_digest() if digest is None else digest
    cache = default_cache_dir() if cache_dir is None else cache_dir
    folder = cache / f"{MODEL_NAME}-{expected[:16]}" / MODEL_NAME
    if _is_whole(folder):  # also where the cache may be read only
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder.parent / "lock"):
            if not _is_whole(folder):
                _expand_into(folder, packed, expected)
    except OSError as error:
        raise CheckpointError(
            f"{cache}: {MODEL_NAME} cannot be unpacked there: {error.strerror or error}; "
            f"{CACHE_VARIABLE} names another folder"
        ) from error
    return folder


def _expand_into(folder: Path, packed: Path, expected: str) -> None:
    # Imported here: who finds the folder in place needs none of it.
    from antiphon.demo.expand import expand
    from antiphon.demo.packed import read_packed

    found = _sha256(packed)
    if found != expected:
        raise CheckpointError(f"{packed}: sha256 is {found}, expected {expected}")
    for leftover in folder.parent.glob(f".{MODEL_NAME}.*"):  # of a start that was killed
        shutil.rmtree(leftover)
    if folder.exists():
        shutil.rmtree(folder)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{MODEL_NAME}."))
    try:
        partial = scratch / MODEL_NAME
        expand(read_packed(packed), partial)
        sums = {file.name: _sha256(file) for file in sorted(partial.iterdir())}
        (partial / _SUMS).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
        partial.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Hold an advisory lock, which ends with the process whatever happens to it."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(folder: Path) -> bool:
    """Whether every file that was written is there as it was written."""
    try:
        sums = json.loads((folder / _SUMS).read_text(encoding="utf-8"))
        return bool(sums) and all(_sha256(folder / name) == expected for name, expected in sums.items())
    except (OSError, ValueError, AttributeError, TypeError, CheckpointError):
        return False


def _shipped_digest() -> str:
    try:
        digest = json.loads(DIGEST_FILE.read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{DIGEST_FILE}: cannot be read: {error}") from error
    return str(digest)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
