"""The grammar of an answer that must have a form: which headers it may have, and what stands behind them.

Where a conversation demands a form, every header is one of those that the format has for it, in each spelling
that models use. Thinking and other texts behind them stay free; what must be JSON follows its schema.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.protocol.grammar import (
    FreeText,
    GrammarRegion,
    GrammarSpec,
    OneOfSequences,
    RegionContent,
)
from antiphon.router.conversation import Conversation
from antiphon.router.demands import AnswerDemands, demands_of
from antiphon.router.harmony.markers import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from antiphon.router.harmony.prompt import FUNCTIONS
from antiphon.router.harmony.vocabulary import Vocabulary

_Header = tuple[int, ...]


def answer_grammar(conversation: Conversation, vocabulary: Vocabulary) -> GrammarSpec | None:
    """The grammar of the answer to a conversation; None when its form is free.

    Raises:
        InvalidPrompt: a call is demanded of a function that is not declared.
    """
    demands = demands_of(conversation)
    return None if demands is None else _AnswerGrammar(vocabulary).spec(demands)


class _AnswerGrammar:
    """Collects the regions of one grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._encode = vocabulary.encode
        self._author = (START, *vocabulary.encode("assistant"))
        self._headers: list[_Header] = []
        self._regions: list[GrammarRegion] = []

    def spec(self, demands: AnswerDemands) -> GrammarSpec:
        """The grammar of these demands."""
        self._add([self._message("analysis")], FreeText(), END)
        if not demands.must_call:
            if demands.answer_schema is None:
                self._add([self._message("commentary")], FreeText(), END)
                self._add([self._message("final")], demands.answer, RETURN)
            else:
                # Without preambles: they are part of what the user sees, which must be JSON and nothing else.
                self._add(self._typed((*self._author, CHANNEL), "final"), demands.answer, RETURN)
        for call in demands.calls:
            self._add(self._calls(call.name), call.arguments, CALL)
        header = GrammarRegion(((END,),), OneOfSequences(tuple(self._headers)))
        return GrammarSpec((header, *self._regions), (END, *self._author))

    def _add(self, headers: Sequence[_Header], content: RegionContent, closer: int) -> None:
        self._headers += headers
        self._regions.append(GrammarRegion(tuple(headers), content, (closer,)))

    def _message(self, channel: str) -> _Header:
        return (*self._author, CHANNEL, *self._encode(channel), MESSAGE)

    def _calls(self, name: str) -> list[_Header]:
        """A call of a function, with the recipient in the role's place and in the channel's."""
        recipient = f" to={FUNCTIONS}.{name}"
        return [
            *self._typed((*self._author, *self._encode(recipient), CHANNEL), "commentary"),
            *self._typed((*self._author, CHANNEL), f"commentary{recipient}"),
        ]

    def _typed(self, before: _Header, text: str) -> list[_Header]:
        """A header that goes on with ``text``: without a content type, and in both ways to write JSON's."""
        return [
            (*before, *self._encode(text), MESSAGE),
            (*before, *self._encode(f"{text} json"), MESSAGE),
            (*before, *self._encode(f"{text} "), CONSTRAIN, *self._encode("json"), MESSAGE),
        ]
