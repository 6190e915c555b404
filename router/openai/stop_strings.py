"""Stop texts, found in what the client would see, wherever token boundaries fall."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text through until one of the stop texts appears; the text before it is the last.

    Text that may be the beginning of a stop text is held back until the next characters decide.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The part of everything fed so far that can be shown now and has not been returned before."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            # The earliest match wins, and of two at one place the longer.
            at, self.matched = min(found, key=lambda match: (match[0], -len(match[1])))
            self._held = ""
            return text[:at]
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once nothing can follow it."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop text begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
