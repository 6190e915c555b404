"""Puts the result of a training in the place of the shipped model: ``python -m antiphon.demo.ship FOLDER``.

Weights, their sha256, vocabulary, metrics, loss curve and the page about them change together, and belong
into one commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

from antiphon.demo.cached_checkpoint import DIGEST_FILE, PACKED_FILE
from antiphon.demo.packed import read_packed
from antiphon.demo.report import METRICS_FILE, PAGE
from antiphon.demo.report import main as write_page
from antiphon.demo.vocabulary import VOCABULARY_FILE, load_vocabulary
from antiphon.protocol.errors import CheckpointError

MOST_BYTES = 20_000_000
"""Of the packed file; every version of it stays in the history."""


def check(packed: Path, vocabulary_file: Path = VOCABULARY_FILE) -> str:
    """The sha256 of a packed file that may ship with a vocabulary.

    Raises:
        CheckpointError: it is damaged, too large, or was trained with another vocabulary.
    """
    size = packed.stat().st_size
    if size > MOST_BYTES:
        raise CheckpointError(f"{packed}: {size:,} bytes, at most {MOST_BYTES:,} may ship")
    if read_packed(packed).token_ids != load_vocabulary(vocabulary_file).token_ids:
        raise CheckpointError(f"{packed}: was trained with another vocabulary than {vocabulary_file}")
    return hashlib.sha256(packed.read_bytes()).hexdigest()


def ship(folder: Path) -> None:
    """Install what ``train.py`` left in ``folder``.

    Raises:
        CheckpointError: see ``check``, or the training has no scores: it did not come to its end.
    """
    packed = folder / PACKED_FILE.name
    vocabulary = folder / VOCABULARY_FILE.name
    digest = check(packed, vocabulary)
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    if "scores" not in metrics:
        raise CheckpointError(f"{folder}: no scores in metrics.json; antiphon.demo.score --metrics adds them")
    shutil.copyfile(packed, PACKED_FILE)
    shutil.copyfile(vocabulary, VOCABULARY_FILE)
    DIGEST_FILE.write_text(json.dumps({"sha256": digest}) + "\n", encoding="utf-8")
    METRICS_FILE.write_text(json.dumps(metrics, separators=(",", ":")) + "\n", encoding="utf-8")
    shutil.copyfile(folder / "loss.png", PAGE.with_name("demo-model-loss.png"))
    load_vocabulary.cache_clear()
    write_page()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    ship(parser.parse_args().folder)


if __name__ == "__main__":
    main()
