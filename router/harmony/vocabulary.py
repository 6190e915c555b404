"""The o200k_harmony vocabulary: shipped with the package, unpacked once per machine, never downloaded."""

from __future__ import annotations

import functools
import hashlib
import lzma
import os
import re
import tempfile
import threading
import unicodedata
from binascii import a2b_base64
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from openai_harmony import HarmonyEncoding, load_harmony_encoding

from antiphon.protocol.errors import AntiphonError
from antiphon.router.harmony.markers import FIRST_SPECIAL, VOCABULARY_SIZE

RANKS_FILE = "o200k_base.tiktoken"
RANKS_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
CACHE_VARIABLE = "ANTIPHON_CACHE_DIR"
"""Environment variable that names the folder to unpack into."""

_ENCODINGS_VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
_load_lock = threading.Lock()

_LONGEST_PIECE = 1000
"""Characters of one byte-pair piece; the encoder's time grows with the square of it, so that a megabyte of
letters without a space would hold the router for minutes. Words of people and programs are far shorter."""

_LONG_RUN = re.compile(
    rf"[^\x00-@\[-`{{-\x7f\s]{{{_LONGEST_PIECE},}}|[^\w\s]{{{_LONGEST_PIECE},}}|_{{{_LONGEST_PIECE},}}|\s{{{_LONGEST_PIECE},}}"
)


class VocabularyError(AntiphonError):
    """The vocabulary cannot be loaded; the message names the file and the reason."""


class Vocabulary:
    """Text to token ids and back. Immutable after construction and safe to share between threads."""

    def __init__(self, encoding: HarmonyEncoding, ranks: Sequence[bytes]) -> None:
        self._encoding = encoding
        special = [encoding.decode([token]) for token in range(FIRST_SPECIAL, VOCABULARY_SIZE)]
        self._special_ids = {name: FIRST_SPECIAL + offset for offset, name in enumerate(special)}
        self.pieces: tuple[bytes, ...] = tuple(ranks) + tuple(name.encode() for name in special)
        """Bytes of every token; a marker's are its name as text."""

    @property
    def size(self) -> int:
        """Token ids are in ``range(size)``."""
        return len(self.pieces)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text. Marker names stay text; a lone surrogate becomes U+FFFD."""
        ids: list[int] = []
        for piece in _bounded_pieces(text):
            ids += self._encoding.encode(piece, disallowed_special=())
        return ids

    def encode_marked(self, text: str) -> list[int]:
        """Token ids of a transcript in which ``<|name|>`` of a known marker is that marker."""
        ids: list[int] = []
        position = 0
        for found in re.finditer(r"<\|\w+\|>", text):
            marker = self._special_ids.get(found.group())
            if marker is not None:
                ids += self.encode(text[position : found.start()])
                ids.append(marker)
                position = found.end()
        return ids + self.encode(text[position:])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, markers by name; bytes that are not UTF-8 and unknown ids become U+FFFD."""
        size = len(self.pieces)
        pieces = (self.pieces[token] if 0 <= token < size else b"\xff" for token in token_ids)
        return b"".join(pieces).decode("utf-8", "replace")


@functools.cache
def load_vocabulary() -> Vocabulary:
    """The vocabulary, loaded at the first call of the process (about 0.4 s) and shared afterwards.

    Raises:
        VocabularyError: no folder can be written to, or the shipped file is damaged.
    """
    path = ranks_path()
    with _load_lock:
        before = os.environ.get(_ENCODINGS_VARIABLE)
        os.environ[_ENCODINGS_VARIABLE] = str(path.parent)
        try:
            encoding = load_harmony_encoding("HarmonyGptOss")
        except Exception as error:
            raise VocabularyError(f"{path}: {error}") from error
        finally:
            if before is None:
                del os.environ[_ENCODINGS_VARIABLE]
            else:
                os.environ[_ENCODINGS_VARIABLE] = before
    return Vocabulary(encoding, _read_ranks(path))


def ranks_path() -> Path:
    """Path of the unpacked ranks file, unpacking it atomically if no intact copy is there.

    Raises:
        VocabularyError: no folder can be written to, or the shipped file is damaged.
    """
    refusals: list[str] = []
    for folder in _cache_folders():
        path = folder / RANKS_SHA256[:16] / RANKS_FILE
        try:
            if not path.is_file() or _sha256(path.read_bytes()) != RANKS_SHA256:
                _write_atomically(path, _unpack())
        except OSError as error:
            refusals.append(f"{path}: {error.strerror or error}")
            continue
        return path
    raise VocabularyError(
        f"the vocabulary cannot be unpacked ({'; '.join(refusals)}); "
        f"set {CACHE_VARIABLE} to a writable folder"
    )


def _cache_folders() -> Iterator[Path]:
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        yield Path(named)
        return
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    yield Path(cache) / "antiphon" / "vocabulary"
    # A container's user may have no home; the content is checked by its hash wherever it lies.
    yield Path(tempfile.gettempdir()) / f"antiphon-{os.getuid()}" / "vocabulary"


def _unpack() -> bytes:
    packed = resources.files("antiphon.router.harmony").joinpath("data").joinpath(f"{RANKS_FILE}.xz")
    try:
        data = lzma.decompress(packed.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise VocabularyError(f"{packed}: {error}") from error
    if _sha256(data) != RANKS_SHA256:
        raise VocabularyError(f"{packed}: sha256 is {_sha256(data)}, expected {RANKS_SHA256}")
    return data


def _write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _read_ranks(path: Path) -> list[bytes]:
    """Bytes by rank; the file lists one base64 piece and its rank a line, in order of rank."""
    ranks = [a2b_base64(line.partition(b" ")[0]) for line in path.read_bytes().splitlines()]
    if len(ranks) != FIRST_SPECIAL:
        raise VocabularyError(f"{path}: {len(ranks)} pieces, expected {FIRST_SPECIAL}")
    return ranks


def _bounded_pieces(text: str) -> Iterator[str]:
    """``text`` cut so that no byte-pair piece is longer than the limit; almost always one part."""
    position = 0
    for run in _LONG_RUN.finditer(text):
        for cut in _cuts(run.group()):
            yield text[position : run.start() + cut]
            position = run.start() + cut
    if position < len(text) or not text:
        yield text[position:]


def _cuts(run: str) -> Iterator[int]:
    """Where to cut a long run: only inside a stretch of one kind that is longer than the limit.

    Letters and the marks on them make one piece; all else that is not a space makes another.
    """
    length = 0
    kind = ""
    for index, character in enumerate(run):
        category = unicodedata.category(character)[0]
        this_kind = "L" if category in "LM" else "Z" if character.isspace() else "S"
        length = length + 1 if this_kind == kind else 1
        kind = this_kind
        if length > _LONGEST_PIECE:
            yield index
            length = 1
