"""``antiphon harmony``: files in, text out; the work is the router's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from antiphon.protocol.errors import AntiphonError
from antiphon.router.harmony.commandline import ParseOptions, parse_output, render_request, tool_policy_of


class UnreadableFile(AntiphonError):
    """A file named on the command line cannot be read."""


def render(request: Path, *, ids: bool, date: str | None) -> None:
    """Print a request's prompt. Raises what ``render_request`` raises, and UnreadableFile."""
    print(render_request(_read(request), ids=ids, current_date=date))


def parse(answer: Path, *, tools: Path | None, step_tokens: int | None, cut_short: bool) -> None:
    """Print an answer's message as JSON. Raises what ``tool_policy_of`` raises, and UnreadableFile."""
    text = _read(answer).decode("utf-8", errors="replace")
    options = ParseOptions(step_tokens=step_tokens, cut_short=cut_short)
    if tools is not None:
        options = ParseOptions(tool_policy_of(_read(tools)), step_tokens, cut_short)
    print(json.dumps(parse_output(text, options), ensure_ascii=False, indent=2))


def _read(path: Path) -> bytes:
    if str(path) == "-":
        return sys.stdin.buffer.read()
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnreadableFile(f"{path}: cannot be read: {error.strerror}") from error
