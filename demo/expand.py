"""The demo model as an ordinary checkpoint folder, expanded from its packed file at first start."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from antiphon.demo.packed import UNSEEN_INPUT, UNSEEN_OUTPUT, PackedModel, read_packed
from antiphon.model.checkpoint.layout import Layout, parameter_specs
from antiphon.model.checkpoint.write import write_checkpoint
from antiphon.protocol.errors import CheckpointError

MODEL_NAME = "gpt-oss-tiny"
PACKED_FILE = Path(__file__).with_name(f"{MODEL_NAME}.bin.xz")
DIGEST_FILE = Path(__file__).with_name(f"{MODEL_NAME}.json")
"""``{"sha256": …}`` of the packed file."""
_COMPLETE = ".complete"


def ensure_demo_checkpoint(cache_dir: Path, packed: Path = PACKED_FILE, digest: str | None = None) -> Path:
    """The folder of the expanded checkpoint (Hugging Face layout), made if it is not there yet.

    The folder's name carries the packed file's sha256, so another version never meets an old folder. It is
    written beside its place and renamed, so that concurrent starts and interruptions leave no half of one.

    Args:
        cache_dir: where expanded checkpoints live; created if absent.
        packed: the packed file.
        digest: its sha256 in hexadecimal; the one shipped beside the file when None.

    Raises:
        CheckpointError: the packed file is missing or is not the one that was shipped.
        OSError: the cache is not writable.
    """
    expected = _shipped_digest() if digest is None else digest
    folder = cache_dir / f"{MODEL_NAME}-{expected[:16]}" / MODEL_NAME
    if _is_whole(folder):
        return folder
    found = _sha256(packed)
    if found != expected:
        raise CheckpointError(f"{packed}: sha256 is {found}, expected {expected}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{MODEL_NAME}."))
    try:
        expand(read_packed(packed), partial)
        sizes = "".join(f"{file.name} {file.stat().st_size}\n" for file in sorted(partial.iterdir()))
        (partial / _COMPLETE).write_text(sizes)
        partial.chmod(0o755)
        _install(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def expand(model: PackedModel, directory: Path) -> None:
    """Write the complete checkpoint of a packed model into ``directory``."""
    write_checkpoint(directory, model.config, _full_parameters(model), Layout.HUGGING_FACE)


def _full_parameters(model: PackedModel) -> Iterator[tuple[str, Tensor]]:
    rows = torch.tensor(model.token_ids)
    for spec in parameter_specs(model.config, Layout.OPENAI):
        if spec.name in ("embedding.weight", "unembedding.weight"):
            unseen = model.weights[UNSEEN_INPUT if spec.name == "embedding.weight" else UNSEEN_OUTPUT]
            full = unseen.repeat(model.config.vocab_size, 1)
            full[rows] = model.weights["embedding.weight"]
            yield spec.name, full
        else:
            yield spec.name, model.weights[spec.name]


def _is_whole(folder: Path) -> bool:
    """Whether every file that was written is there in its full size."""
    try:
        entries = (folder / _COMPLETE).read_text().splitlines()
        return all((folder / n).stat().st_size == int(s) for n, s in (line.split() for line in entries))
    except (OSError, ValueError):
        return False


def _install(partial: Path, folder: Path) -> None:
    """Rename into place; when another process was first, its folder stays."""
    if folder.exists() and not _is_whole(folder):
        shutil.rmtree(folder)
    try:
        os.rename(partial, folder)
    except OSError:
        if not _is_whole(folder):
            raise


def _shipped_digest() -> str:
    try:
        digest = json.loads(DIGEST_FILE.read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{DIGEST_FILE}: cannot be read: {error}") from error
    return str(digest)


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
