"""One choice of a text completion: from token ids to text, with stop texts and log-probabilities."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from antiphon.protocol.messages import TokenLogprobs
from antiphon.router.formatter import ChatFormatter
from antiphon.router.lifecycle import EndKind
from antiphon.router.openai.stop_strings import StopStrings

IMPOSSIBLE_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(slots=True)
class CompletionLogprobs:
    """The four lists of OpenAI's text completion API, one entry per token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def take_first(self, count: int) -> CompletionLogprobs:
        """The entries of the first ``count`` tokens, which are here no longer."""
        taken = CompletionLogprobs(
            self.tokens[:count],
            self.token_logprobs[:count],
            self.top_logprobs[:count],
            self.text_offset[:count],
        )
        del self.tokens[:count], self.token_logprobs[:count], self.top_logprobs[:count]
        del self.text_offset[:count]
        return taken

    def document(self) -> dict[str, object]:
        """The JSON object."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that can be shown, and what is known of the tokens since the last piece."""

    text: str
    logprobs: CompletionLogprobs


class CompletionAnswer:
    """Decodes one choice's tokens. ``stop_ids`` end the text and are never shown."""

    def __init__(
        self,
        formatter: ChatFormatter,
        stops: Sequence[str],
        stop_ids: Sequence[int],
        *,
        skip_markers: bool,
        text_offset: int = 0,
    ) -> None:
        self._formatter = formatter
        self._stops = StopStrings(stops)
        self._stop_ids = frozenset(stop_ids)
        self._skip_markers = skip_markers
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded_chars = text_offset
        self._shown_chars = text_offset
        self._pending = CompletionLogprobs()
        self.token_count = 0

    def has_stopped(self) -> bool:
        """A stop text appeared: nothing more is wanted."""
        return self._stops.matched is not None

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> TextPiece:
        """Take new tokens; the text they let the client see, perhaps none."""
        shown: list[str] = []
        for i, token_id in enumerate(token_ids):
            if self.has_stopped():
                break
            self.token_count += 1
            if token_id in self._stop_ids:
                continue
            if logprobs is not None:
                self._note(token_id, logprobs[i])
            if not (self._skip_markers and self._formatter.is_marker(token_id)):
                text = self._decoder.decode(self._formatter.token_bytes(token_id))
                self._decoded_chars += len(text)
                shown.append(self._stops.feed(text))
        return self._piece("".join(shown))

    def finish(self) -> TextPiece:
        """End the choice; what was still held back."""
        text = ""
        if not self.has_stopped():
            text = self._stops.feed(self._decoder.decode(b"", final=True))
        if not self.has_stopped():
            text += self._stops.flush()
        return self._piece(text, whole=True)

    def finish_reason(self, kind: EndKind) -> str:
        """OpenAI's ``finish_reason``."""
        return "length" if kind is EndKind.LENGTH and not self.has_stopped() else "stop"

    def _note(self, token_id: int, values: TokenLogprobs) -> None:
        self._pending.tokens.append(self._text(token_id))
        self._pending.token_logprobs.append(max(values.chosen, IMPOSSIBLE_LOGPROB))
        self._pending.top_logprobs.append(
            {self._text(other): max(value, IMPOSSIBLE_LOGPROB) for other, value in values.top}
        )
        self._pending.text_offset.append(self._decoded_chars)

    def _text(self, token_id: int) -> str:
        """A token as a key of JSON; one that is no whole text is told by its bytes."""
        raw = self._formatter.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _piece(self, text: str, *, whole: bool = False) -> TextPiece:
        """Log-probabilities wait until the text in which their tokens begin is shown.

        Tokens of a stop text never get there, however many came at one time.
        """
        self._shown_chars += len(text)
        pending = self._pending
        all_shown = whole and not self.has_stopped()
        begun = len(pending.tokens) if all_shown else bisect_left(pending.text_offset, self._shown_chars)
        return TextPiece(text, pending.take_first(begun))
