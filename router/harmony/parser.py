"""Token ids of one answer as reasoning, content and tool calls, tolerantly and as they come.

The parser is always in one of three states: between messages, in a header, in a body. It never looks ahead:
what a token does depends on the tokens before it only, so that the deltas do not depend on how tokens are
grouped into steps. Every deviation from the format has one meaning and is counted by kind.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections import Counter
from collections.abc import Sequence
from enum import Enum

from antiphon.protocol.messages import FinishReason
from antiphon.router.formatter import ChatDelta, OutputRegion, ParserOutcome
from antiphon.router.harmony.answer import AnswerWriter, Sink
from antiphon.router.harmony.headers import (
    Channel,
    HeaderPart,
    HeaderReading,
    Origin,
    is_cut_header,
    is_noise,
    read_header,
)
from antiphon.router.harmony.markers import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END_OF_TEXT,
    FIRST_SPECIAL,
    MESSAGE,
    START,
    TERMINATORS,
    VOCABULARY_SIZE,
)
from antiphon.router.harmony.recipients import (
    VISIBLE_RECIPIENTS,
    FunctionRecipient,
    ToolPolicy,
    function_of,
)
from antiphon.router.harmony.repairs import Repair

HEADER_LIMIT_BYTES = 256
"""A header longer than this is text whose header is missing; until then it is held back."""

_MARKER_BYTES = 8
"""What a marker in a header counts for, so that a run of them ends, too."""
_BRACKET = re.compile(rb"[{\[]")
_NOT_UTF8 = b"\xff"


class _State(Enum):
    BETWEEN = "between"
    HEADER = "header"
    BODY = "body"


class HarmonyParser:
    """Incremental parser of what follows ``<|start|>assistant``; implements ``OutputParser``.

    ``pieces`` are the bytes of every token id.
    """

    def __init__(self, pieces: Sequence[bytes], tools: ToolPolicy) -> None:
        self._pieces = pieces
        self._tools = tools
        self._repairs: Counter[Repair] = Counter()
        self._writer = AnswerWriter(self._repairs)
        self._state = _State.HEADER
        self._origin = Origin.PROMPT
        self._header: list[tuple[int, bytearray]] = [(START, bytearray())]
        self._header_bytes = 0
        self._orphan: HeaderReading | None = None
        """A header that something else ended than its message, which may still follow."""
        self._partial = b""
        self._is_addressed = False
        self._last_was_body = False
        self._reasoning_tokens = 0

    @property
    def region(self) -> OutputRegion:
        """The region of the last token fed; STRUCTURE before the first."""
        return self._writer.sink.value if self._last_was_body else OutputRegion.STRUCTURE

    def feed(self, token_ids: Sequence[int]) -> list[ChatDelta]:
        """Take the next output tokens, stop token included; the deltas they complete, in order."""
        for token in token_ids:
            self._take(token)
        return self._writer.take()

    def finish(self, reason: FinishReason) -> ParserOutcome:
        """End the answer; the rest of a code point is U+FFFD, a header that was cut short is dropped."""
        if self._state is _State.HEADER:
            self._cut_header()
        self._end_orphan()
        self._close_body(complete=reason is FinishReason.STOP)
        self._writer.settle()
        return ParserOutcome(
            deltas=tuple(self._writer.take()),
            tool_calls=self._writer.calls,
            reasoning_tokens=self._reasoning_tokens,
            repairs={repair.value: count for repair, count in self._repairs.items()},
        )

    # ------------------------------------------------------------------------------------------- tokens

    def _take(self, token: int) -> None:
        if 0 <= token < FIRST_SPECIAL:
            piece = self._pieces[token]
        elif 0 <= token < VOCABULARY_SIZE:
            self._last_was_body = False
            self._end_code_point()
            self._marker(token)
            return
        else:
            self._repairs[Repair.UNKNOWN_TOKEN] += 1
            piece = _NOT_UTF8
        if self._state is _State.BODY:
            self._body_piece(piece)
        else:
            self._last_was_body = False
            self._header_piece(piece)

    def _body_piece(self, piece: bytes) -> None:
        if self._partial:
            piece = self._partial + piece
        text, used = utf_8_decode(piece, "replace", False)
        self._partial = piece[used:]
        self._writer.write(text)
        self._last_was_body = True
        if self._writer.sink is Sink.REASONING:
            self._reasoning_tokens += 1

    def _header_piece(self, piece: bytes) -> None:
        if self._state is _State.BETWEEN:
            self._repairs[Repair.START_MISSING] += 1
            self._begin_header(Origin.IMPLIED)
        text = self._header[-1][1]
        # Only the first bracket can be the beginning of the message.
        may_be_json = _BRACKET.search(piece) is not None and _BRACKET.search(text) is None
        text += piece
        self._header_bytes += len(piece)
        if self._header_bytes > HEADER_LIMIT_BYTES:
            self._open_unmarked_body()
        elif may_be_json:
            self._json_in_header()

    def _marker(self, token: int) -> None:
        if token == START:
            self._start()
        elif token == MESSAGE:
            self._message()
        elif token in (CHANNEL, CONSTRAIN):
            self._header_marker(token)
        elif token in TERMINATORS:
            self._terminator(token)
        else:
            self._repairs[Repair.RESERVED_TOKEN] += 1

    # ------------------------------------------------------------------------------------------ markers

    def _start(self) -> None:
        if self._state is _State.BODY:
            self._repairs[Repair.END_MISSING] += 1
            self._close_body(complete=True)
        elif self._state is _State.HEADER:
            self._repairs[Repair.START_REPEATED] += 1
            self._abandoned_header()
        self._begin_header(Origin.MARKED)

    def _message(self) -> None:
        if self._state is _State.BODY:
            self._repairs[Repair.STRAY_MARKER] += 1
            return
        if self._state is _State.BETWEEN:
            self._repairs[Repair.START_MISSING] += 1
            self._begin_header(Origin.IMPLIED)
        reading = read_header(self._parts(), self._origin, ended=True)
        if self._orphan is not None and reading.says_nothing():
            reading, self._orphan = self._orphan, None
        self._open_body(reading)

    def _header_marker(self, token: int) -> None:
        if self._state is _State.BODY:
            if token == CONSTRAIN:
                self._repairs[Repair.STRAY_MARKER] += 1
                return
            self._repairs[Repair.END_MISSING] += 1
            self._close_body(complete=True)
            self._begin_header(Origin.INLINE)
        elif self._state is _State.BETWEEN:
            self._repairs[Repair.START_MISSING] += 1
            self._begin_header(Origin.IMPLIED)
        self._header.append((token, bytearray()))
        self._header_bytes += _MARKER_BYTES
        if self._header_bytes > HEADER_LIMIT_BYTES:
            self._open_unmarked_body()

    def _terminator(self, token: int) -> None:
        if self._state is _State.BODY:
            if token == CALL and not self._is_addressed:
                self._repairs[Repair.CALL_WITHOUT_RECIPIENT] += 1
            self._close_body(complete=True)
        elif self._state is _State.HEADER:
            self._abandoned_header(called=token == CALL)
        elif token != END_OF_TEXT:
            self._repairs[Repair.STRAY_TERMINATOR] += 1
        self._state = _State.BETWEEN

    # ------------------------------------------------------------------------------------------ headers

    def _begin_header(self, origin: Origin) -> None:
        self._state = _State.HEADER
        self._origin = origin
        self._header = [(START, bytearray())]
        self._header_bytes = 0

    def _parts(self) -> list[HeaderPart]:
        return [HeaderPart(marker, text.decode("utf-8", "replace")) for marker, text in self._header]

    def _is_empty_header(self) -> bool:
        return self._header_bytes == 0 and len(self._header) == 1

    def _abandoned_header(self, *, called: bool = False) -> None:
        """A header that ended without ``<|message|>``: what is not header in it is the message.

        ``called`` is that ``<|call|>`` ended it.
        """
        if self._is_empty_header():
            return
        self._repairs[Repair.MESSAGE_MISSING] += 1
        reading = read_header(self._parts(), self._origin, ended=False, called=called)
        # An answer may be a dash or a dot; between messages, or behind a channel, that is noise.
        may_be_noise = self._origin is not Origin.PROMPT or not reading.headless
        nowhere = reading.channel is None and not reading.recipients and bool(reading.body)
        if (reading.headless or reading.garbled or nowhere) and is_noise(
            reading.body, punctuation=may_be_noise
        ):
            self._repairs[Repair.HEADER_DROPPED] += 1
        elif reading.headless:
            self._repairs[Repair.HEADER_MISSING] += 1
            self._end_orphan()
            self._writer.hold(reading.body)
        elif reading.body:
            self._open_body(reading)
            self._close_body(complete=True)
        else:
            self._end_orphan()
            self._orphan = reading

    def _end_orphan(self) -> None:
        """No message followed the header that waited for one: a call in it has no arguments."""
        orphan, self._orphan = self._orphan, None
        if orphan is not None and orphan.recipients:
            self._open_body(orphan)
            self._close_body(complete=True)

    def _cut_header(self) -> None:
        """A header that the end of the output cut short: a call in it may lack half its name."""
        if self._is_empty_header():
            return
        reading = read_header(self._parts(), self._origin, ended=False)
        if is_cut_header(reading.body) or reading.recipients:
            self._repairs[Repair.HEADER_CUT] += 1
            return
        self._abandoned_header()

    def _json_in_header(self) -> None:
        """An opening bracket behind a readable header starts the message even without ``<|message|>``."""
        reading = read_header(self._parts(), self._origin, ended=False)
        if reading.body[:1] in ("{", "[") and not reading.headless and not reading.garbled:
            self._open_unmarked_body()

    def _open_unmarked_body(self) -> None:
        """The header turns into a message that goes on: its last code point may still be incomplete."""
        self._repairs[Repair.MESSAGE_MISSING] += 1
        last = self._header[-1][1]
        _, whole = utf_8_decode(last, "replace", False)
        partial = bytes(last[whole:])
        del last[whole:]
        reading = read_header(self._parts(), self._origin, ended=False)
        if reading.headless:
            self._repairs[Repair.HEADER_MISSING] += 1
        self._open_body(reading)
        self._partial = partial

    # ------------------------------------------------------------------------------------------- bodies

    def _open_body(self, reading: HeaderReading) -> None:
        self._repairs.update(reading.repairs)
        if reading.stray:
            self._writer.hold(reading.stray)
        self._end_orphan()
        self._state = _State.BODY
        self._is_addressed = bool(reading.recipients)
        self._route(reading)
        self._writer.write(reading.body)

    def _close_body(self, *, complete: bool) -> None:
        if self._state is _State.BODY:
            self._end_code_point()
            self._writer.close(complete=complete)
        self._state = _State.BETWEEN

    def _end_code_point(self) -> None:
        """Bytes that wait for the rest of their code point will not get it: none spans a marker."""
        if self._partial:
            self._repairs[Repair.CODE_POINT_CUT] += 1
            self._writer.write(utf_8_decode(self._partial, "replace", True)[0])
            self._partial = b""

    def _route(self, reading: HeaderReading) -> None:
        """Open the place that the message's text goes to."""
        function = self._function(reading)
        if reading.foreign_author:
            self._repairs[Repair.FOREIGN_AUTHOR] += 1
            self._writer.open(Sink.REASONING)
        elif function is not None:
            self._route_call(function, reading.channel)
        elif self._is_for_machinery(reading):
            self._writer.open(Sink.REASONING)
        elif reading.channel is Channel.FINAL and not reading.garbled:
            self._writer.open_final()
        else:
            thought = reading.garbled or reading.channel is Channel.ANALYSIS
            self._writer.open(Sink.REASONING if thought else Sink.CONTENT)

    def _route_call(self, function: FunctionRecipient, channel: Channel | None) -> None:
        if not self._may_surface(function.name):
            self._writer.open(Sink.REASONING)
            return
        if channel is not Channel.COMMENTARY:
            self._repairs[Repair.CALL_CHANNEL] += 1
        if function.repair is not None:
            self._repairs[function.repair] += 1
        self._writer.open_call(function.name)

    def _function(self, reading: HeaderReading) -> FunctionRecipient | None:
        functions = (function_of(recipient, self._tools.names) for recipient in reading.recipients)
        return next((function for function in functions if function is not None), None)

    def _may_surface(self, name: str) -> bool:
        """Whether one more call, of this function, may be shown; else it is reasoning, and counted."""
        allowed = self._tools.allowed
        if not self._tools.surface or (allowed is not None and name not in allowed):
            self._repairs[Repair.CALL_NOT_ALLOWED] += 1
            return False
        if self._tools.max_calls is not None and self._writer.calls >= self._tools.max_calls:
            self._repairs[Repair.CALL_BEYOND_LIMIT] += 1
            return False
        return True

    def _is_for_machinery(self, reading: HeaderReading) -> bool:
        """Whether the message is addressed to something that is neither a reader nor a function."""
        hidden = [one for one in reading.recipients if one not in VISIBLE_RECIPIENTS]
        if not hidden or reading.channel is Channel.FINAL:
            return False
        self._repairs[Repair.RECIPIENT_UNKNOWN] += 1
        return True
