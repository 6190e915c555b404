"""The loads of the comparison: prompts and answers of given lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass

from antiphon.benchmarks.serve.arrivals import WorkloadError


@dataclass(frozen=True, slots=True)
class Mix:
    """Prompts of ``input_tokens``, answers of ``output_tokens``."""

    name: str
    input_tokens: int
    output_tokens: int


MIXES = (
    Mix("long-in", 5000, 250),
    Mix("chat", 1000, 500),
    Mix("long-out", 500, 2000),
)


def parse_mixes(text: str) -> list[Mix]:
    """``long-in,chat`` of the mixes above, or others such as ``mine=2000/100``.

    Raises:
        WorkloadError: no such mix, or no lengths.
    """
    known = {mix.name: mix for mix in MIXES}
    found = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        match = re.fullmatch(r"([\w-]+)=(\d+)/(\d+)", part)
        if match is not None and int(match[2]) > 0 and int(match[3]) > 1:
            found.append(Mix(match[1], int(match[2]), int(match[3])))
        elif part in known:
            found.append(known[part])
        else:
            raise WorkloadError(
                f"mix {part!r}: expected {', '.join(known)}, or NAME=INPUT/OUTPUT tokens (2 out at least)"
            )
    if not found:
        raise WorkloadError("no mix is named")
    return found
