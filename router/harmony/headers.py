"""Reading a message's header leniently, from its decoded text.

The format's header is ``role to=recipient<|channel|>channel to=recipient <|constrain|>type``. Models
repeat parts of it, glue them together, misspell them, leave out markers, and forget the ``<|message|>`` that
ends it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum, StrEnum

from antiphon.router.harmony.markers import CHANNEL, CONSTRAIN, START
from antiphon.router.harmony.repairs import Repair


class Channel(StrEnum):
    """Where a message goes."""

    ANALYSIS = "analysis"
    COMMENTARY = "commentary"
    FINAL = "final"


class Origin(Enum):
    """How a header began."""

    PROMPT = "prompt"
    """The prompt ended with ``<|start|>assistant``: the role has been written."""
    MARKED = "marked"
    """The model wrote ``<|start|>``."""
    IMPLIED = "implied"
    """Text or a header marker follows the end of a message without ``<|start|>``."""
    INLINE = "inline"
    """``<|channel|>`` stands inside a message that was not ended."""


@dataclass(frozen=True, slots=True)
class HeaderPart:
    """A marker (``START`` stands for the beginning, written or not) and the text after it."""

    marker: int
    text: str


@dataclass(slots=True)
class HeaderReading:
    """What a header says. ``names_author`` is that it names the assistant.

    ``body`` is text that belongs to the message, found in a header that has no ``<|message|>``. ``headless``
    means that nothing was recognised: all of it is body. ``garbled`` means that a channel runs into other
    text, which cannot be trusted to be meant for the user. ``stray`` is a sentence that stands in the header
    where words of a header should.
    """

    channel: Channel | None = None
    recipients: list[str] = field(default_factory=list)
    foreign_author: bool = False
    body: str = ""
    stray: str = ""
    headless: bool = False
    garbled: bool = False
    names_author: bool = False
    repairs: list[Repair] = field(default_factory=list)

    def says_nothing(self) -> bool:
        """Whether it is empty, or a content type and no more."""
        return self.channel is None and not (
            self.recipients or self.stray or self.foreign_author or self.names_author
        )


_RECIPIENT = re.compile(
    r"""(?:to\s*=+\s*)+["'`(<]?((?:functions\s*\.\s*)?(?:(?!to\s*=)[^\s<>{\["'`()])*)["'`)>]?""",
    re.IGNORECASE,
)
_NAMESPACED = re.compile(r"""functions\.[^\s<>{\["'`()]+""")
_ADDRESSED = re.compile(
    r"""(?:(?:to|recipient)[\s=:]*|[=:]\s*)["'`(<]?(functions[.:/]+[^\s<>{\["'`()]+)["'`)>]?""", re.IGNORECASE
)
"""A recipient whose ``to=`` is spelled in another way. Only the namespace tells it from a sentence."""
_CHANNEL_NAMES = "analysis|commentary|final"
_CHANNEL_WORD = re.compile(rf"({_CHANNEL_NAMES})", re.IGNORECASE)
_BARE_CHANNEL = re.compile(rf"\s*({_CHANNEL_NAMES})(?![a-z_'’-])")
_LAST_CHANNEL = re.compile(rf"({_CHANNEL_NAMES})$", re.IGNORECASE)
_CONTENT_TYPE = re.compile(r"""(?:json|code)(?=[\s{\["]|$)""")
_TYPE_WORD = re.compile(r"[\w./+-]+")
_ASSISTANT = re.compile(r"\s*(?:assistant)+(?::\S+(?=\s|$))?")
_FOREIGN_AUTHOR = re.compile(r"\s*(?:user|system|developer|tool|python|browser)(?:[.:]\S+)?(?=\s|$)")
_WORD = re.compile(r"[^\s{\[<]+")
_JUNK_WORD = re.compile(r"\S+")
_SENTENCE = re.compile(
    r"(?!.*\bto\s*=)(?!.*\b(?:to|recipient)[\s:]+functions\.)\S+(?:\s+\S+){2,}", re.DOTALL | re.IGNORECASE
)
"""Three words or more, none of them a recipient."""
_ALIASES = {
    "think": Channel.ANALYSIS,
    "thinking": Channel.ANALYSIS,
    "thought": Channel.ANALYSIS,
    "reasoning": Channel.ANALYSIS,
    "answer": Channel.FINAL,
    "response": Channel.FINAL,
}
_SHORTEST_STEM = 4
"""Letters by which a cut-off channel name is still recognised (``comment``)."""
_RESEMBLANCE = 0.65
"""Share of letters, as difflib counts them, by which a misspelt channel name is (``analyse``)."""
_BEFORE_TEXT = frozenset(":\"'*#`(-")
"""What a text may begin with that is glued to its channel's name."""
_LONE_WORDS = frozenset({"assistant", "functions", "json", "code"})
"""Words of a header that are left over when they stand alone between two messages."""
_HEADER_WORDS = (*Channel, "assistant", "to=functions.", "json", "code")


def read_header(
    parts: Sequence[HeaderPart], origin: Origin, *, ended: bool, called: bool = False
) -> HeaderReading:
    """Read a header.

    Args:
        ended: ``<|message|>`` closed it, so that none of it is body.
        called: ``<|call|>`` did, so that what looks like a recipient in front of a text is one.
    """
    return _HeaderScanner(parts, origin, ended, called).reading


def is_cut_header(text: str) -> bool:
    """Whether an output that stops here stopped inside a word of a header."""
    word = text.strip()
    return any(expected.startswith(word) for expected in _HEADER_WORDS)


def is_noise(text: str, *, punctuation: bool) -> bool:
    """Whether nothing in ``text`` can be seen; with ``punctuation``, or has a meaning of its own."""
    if punctuation and text.strip() in _LONE_WORDS:
        return True
    return all(one.isspace() or (punctuation and unicodedata.category(one)[0] == "P") for one in text)


def _resembled(name: str) -> Channel | None:
    """The channel that a misspelt, cut or glued name (``assistantanalysis``) was meant to be."""
    if (last := _LAST_CHANNEL.search(name)) is not None:
        return Channel(last.group(1))
    if (cut := next((one for one in Channel if one.startswith(name)), None)) is not None:
        return cut
    close = get_close_matches(name, tuple(Channel), 1, _RESEMBLANCE)
    return Channel(close[0]) if close else None


class _HeaderScanner:
    """Consumes a header from left to right; what it does not recognise is junk, or the body."""

    def __init__(self, parts: Sequence[HeaderPart], origin: Origin, ended: bool, called: bool) -> None:
        self.reading = HeaderReading()
        self._origin = origin
        self._ended = ended
        self._called = called
        self._alone = len(parts) == 1
        self._named_author = False
        for number, part in enumerate(parts):
            body_may_follow = not ended and number == len(parts) - 1
            position = self._opening(part)
            self._rest(part, position, body_may_follow)
        if self._named_author and "assistant" in self.reading.recipients:
            self.reading.foreign_author = True
        if len(self.reading.recipients) > 1:
            self.reading.repairs.append(Repair.RECIPIENT_REPEATED)
        if sum(part.marker == CHANNEL for part in parts) > 1:
            self.reading.repairs.append(Repair.CHANNEL_REPEATED)

    def _opening(self, part: HeaderPart) -> int:
        """Where the part goes on after what its marker announces."""
        if part.marker == START:
            return self._author(part.text)
        if part.marker == CHANNEL:
            return self._channel(part.text)
        if part.marker == CONSTRAIN:
            return self._content_type(part.text)
        raise ValueError(f"marker {part.marker} does not belong into a header")

    def _author(self, text: str) -> int:
        certain = self._ended or not self._alone
        written = self._origin in (Origin.MARKED, Origin.IMPLIED)
        if written and certain and (foreign := _FOREIGN_AUTHOR.match(text)):
            self.reading.foreign_author = True
            return foreign.end()
        assistant = _ASSISTANT.match(text)
        if assistant is None:
            return 0
        self.reading.names_author = True
        if certain or self._origin is Origin.MARKED or _CHANNEL_WORD.match(text, assistant.end()):
            if self._origin is not Origin.MARKED or assistant.group().strip() != "assistant":
                self.reading.repairs.append(Repair.HEADER_AUTHOR)
            return assistant.end()
        return 0

    def _content_type(self, text: str) -> int:
        """Behind its own marker any word is a type, unless it may be the message already."""
        start = len(text) - len(text.lstrip())
        if self._ended and self.reading.channel is None and (channel := _BARE_CHANNEL.match(text, start)):
            self.reading.channel = Channel(channel.group(1))
            self.reading.repairs.append(Repair.CHANNEL_UNMARKED)
            return channel.end()
        word = (_TYPE_WORD if self._ended else _CONTENT_TYPE).match(text, start)
        return start if word is None or _RECIPIENT.match(text, start) else word.end()

    def _channel(self, text: str) -> int:
        start = len(text) - len(text.lstrip())
        word = _WORD.match(text, start)
        if word is None or any(known.match(text, start) for known in (_RECIPIENT, _NAMESPACED, _ADDRESSED)):
            self.reading.repairs.append(Repair.CHANNEL_MISSING)
            return start
        known = _CHANNEL_WORD.match(text, start)
        if known is not None:
            return self._known_channel(text, known, word.end())
        name = word.group().strip(".,:;!?*_-").lower()
        channel = _ALIASES.get(name)
        if channel is None and len(name) >= _SHORTEST_STEM:
            channel = _resembled(name)
        self.reading.repairs.append(Repair.CHANNEL_UNKNOWN)
        if channel is None:
            return word.end() if self._ended else start
        self.reading.channel = channel
        return word.end()

    def _known_channel(self, text: str, known: re.Match[str], word_end: int) -> int:
        name = known.group()
        tail = text[known.end() : word_end]
        follows_cleanly = (
            not tail
            or _RECIPIENT.match(text, known.end()) is not None
            or _ADDRESSED.match(text, known.end()) is not None
            or _CONTENT_TYPE.match(text, known.end()) is not None
        )
        self.reading.channel = Channel(name.lower())
        if name != name.lower():
            self.reading.repairs.append(Repair.CHANNEL_CASE)
        if follows_cleanly:
            return known.end()
        self.reading.repairs.append(Repair.CHANNEL_GLUED)
        if self._ended:
            if (last := _LAST_CHANNEL.search(tail)) is not None:  # "analysisfinal": the last of several
                self.reading.channel = Channel(last.group(1).lower())
            return word_end
        # "finalHello" is a channel and a sentence; "commentary?" and "finally" are neither.
        begins = tail[0].isalnum() and not tail[0].islower()
        self.reading.garbled = not (
            begins or (tail[0] in _BEFORE_TEXT and not is_noise(text[known.end() :], punctuation=True))
        )
        if tail[0].islower():
            return known.start()
        return known.end() + (tail[0] == ":")

    def _rest(self, part: HeaderPart, position: int, body_may_follow: bool) -> None:
        text = part.text
        reading = self.reading
        opened = position
        # Where recipients begin behind which nothing else was recognised, and what had been read before.
        addressed: tuple[int, int, int] | None = None
        while True:
            position += len(text[position:]) - len(text[position:].lstrip())
            if position == len(text):
                return
            before = len(reading.recipients), len(reading.repairs)
            if (found := self._recognised(part, position)) is not None:
                if len(reading.recipients) == before[0]:
                    addressed = None  # a content type or a channel behind it: it stands in a header
                elif addressed is None:
                    addressed = (position, *before)
                position = found
                continue
            if body_may_follow:
                if addressed is not None and self._is_text(text, position):
                    position, recipients, repairs = addressed
                    del reading.recipients[recipients:], reading.repairs[repairs:]
                    reading.repairs.append(Repair.RECIPIENT_IN_TEXT)
                reading.headless = part.marker == START and not reading.recipients and reading.channel is None
                # Without any header the text is taken as it is; behind one, the space that parts them is not.
                reading.body = text[opened:] if reading.headless else text[position:]
                return
            junk = _JUNK_WORD.match(text, position)
            if junk is None:
                return
            position = self._skip_junk(text, junk)

    def _is_text(self, text: str, position: int) -> bool:
        """Whether a recipient, and what stands at ``position`` behind it, are words of one text.

        Recipients stand in headers only, and nothing has ended this one. It is a call's where it says so
        itself, by the channel of calls, or by arguments; or where ``<|call|>`` followed.
        """
        return not (self._called or self.reading.channel is Channel.COMMENTARY or text[position] in "{[")

    def _skip_junk(self, text: str, word: re.Match[str]) -> int:
        """Step over a word that means nothing here; several in a row are a sentence, which is kept."""
        sentence = text[word.start() :].rstrip()
        if self.reading.stray or _SENTENCE.fullmatch(sentence) is None:
            self.reading.repairs.append(Repair.HEADER_JUNK)
            return word.end()
        self.reading.repairs.append(Repair.HEADER_TEXT)
        self.reading.stray = sentence
        return len(text)

    def _recognised(self, part: HeaderPart, position: int) -> int | None:
        """The end of the recipient, bare channel or content type that stands at ``position``."""
        text = part.text
        reading = self.reading
        if (recipient := _RECIPIENT.match(text, position)) is not None and recipient.group(1):
            name = "".join(recipient.group(1).split())
            if recipient.group().rstrip() != f"to={name}":
                reading.repairs.append(Repair.RECIPIENT_SPELLING)
            reading.recipients.append(name)
            return recipient.end()
        if (addressed := _ADDRESSED.match(text, position)) is not None:
            reading.recipients.append(addressed.group(1))
            reading.repairs.append(Repair.RECIPIENT_SPELLING)
            return addressed.end()
        if (named := _NAMESPACED.match(text, position)) is not None:
            reading.recipients.append(named.group())
            reading.repairs.append(Repair.RECIPIENT_UNMARKED)
            self._named_author |= part.marker == START
            return named.end()
        if part.marker == START and self._is_bare_channel(part, position):
            word = _CHANNEL_WORD.match(text, position)
            if word is not None:
                reading.channel = Channel(word.group())
                reading.repairs.append(Repair.CHANNEL_UNMARKED)
                return word.end()
        in_header = part.marker != START or reading.channel is not None or bool(reading.recipients)
        if in_header and (content_type := _CONTENT_TYPE.match(text, position)) is not None:
            return content_type.end()
        return None

    def _is_bare_channel(self, part: HeaderPart, position: int) -> bool:
        """Whether a channel's name without its marker is meant as one, and not as a word of a sentence."""
        if self.reading.channel is not None:
            return False
        word = _BARE_CHANNEL.match(part.text, position)
        if word is None:
            return False
        if self._ended or self._origin is not Origin.PROMPT or self.reading.recipients:
            return True
        before, after = part.text[:position][-1:], part.text[word.end() :][:1]
        return not self._alone or bool(before.strip()) or after.isupper() or after in ("{", "[", '"')
