"""What a bundle holds, as its ``manifest.json`` says. Needs nothing but Python: the bare machine reads it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

NAME = "manifest.json"
FORMAT = 1
CODE = ("*.py", "*.cu", "*.cuh")
CHANGES = "+changes"


@dataclass(frozen=True, slots=True)
class Item:
    """One file of a part.

    Attributes:
        what: a wheel, or a compiled library.
        name: of the distribution, or of the library's file.
        version: of the distribution; of a library, that is in its name.
        left_out: folders of the published wheel that this one lacks.
    """

    what: Literal["wheel", "library"]
    name: str
    version: str
    file: str
    part: int
    size_bytes: int
    sha256: str
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerTree:
    """Another system's tree, which travels by itself.

    Attributes:
        path: a folder or an archive that holds ``site/``; relative to the checkout's root, or absolute.
        sha256: of an archive; empty for a folder.
    """

    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole bundle.

    Attributes:
        kind: of the programs that it serves.
        commit: of the checkout that it was made in.
        sources: hash of that checkout's code, which may be another's than the one that is measured.
        python: version that its wheels are for.
    """

    kind: str
    commit: str
    sources: str
    made: str
    python: str
    items: tuple[Item, ...]
    peer_tree: PeerTree | None = None

    @property
    def parts(self) -> int:
        """How many there are."""
        return max((item.part for item in self.items), default=0)

    def commit_of(self, root: Path) -> str:
        """What figures of a checkout are kept under: ``+changes`` says that its code is another."""
        if sources_digest(root) == self.sources or self.commit.endswith(CHANGES):
            return self.commit
        return self.commit + CHANGES

    def write(self, folder: Path) -> None:
        """Into the bundle's folder."""
        (folder / NAME).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Of a bundle's folder.

        Raises:
            ValueError: it holds none, or one of another format; the message says which.
        """
        path = folder / NAME
        try:
            document = json.loads(path.read_text())
            found = document.pop("format")
            if found != FORMAT:
                raise ValueError(f"{path}: format {found}, this checkout reads {FORMAT}")
            items = tuple(
                Item(**{**item, "left_out": tuple(item["left_out"])}) for item in document.pop("items")
            )
            tree = document.pop("peer_tree")
            return cls(items=items, peer_tree=None if tree is None else PeerTree(**tree), **document)
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: no manifest of a bundle: {error}") from error


def sha256_of(path: Path) -> str:
    """In hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sources_digest(root: Path) -> str:
    """Of the names and contents of all code of a checkout."""
    digest = hashlib.sha256()
    for folder in sorted((root / "src/antiphon").iterdir()):
        files = {path for pattern in CODE for path in folder.resolve().rglob(pattern)}
        for path in sorted(files):
            digest.update(str(path.relative_to(root.resolve())).encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()


def part_folder(number: int) -> str:
    """Its name inside the bundle."""
    return f"part-{number}"
