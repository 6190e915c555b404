"""The Harmony format behind the router's ``ChatFormatter`` seam."""

from __future__ import annotations

import datetime
from collections.abc import Callable

from antiphon.configs.front_end import RouterConfig
from antiphon.router.conversation import Conversation, ToolChoiceMode
from antiphon.router.formatter import RenderedPrompt
from antiphon.router.harmony.grammar import answer_grammar
from antiphon.router.harmony.markers import END_OF_TEXT, FIRST_SPECIAL, RETURN, START, STOP_IDS
from antiphon.router.harmony.parser import HarmonyParser
from antiphon.router.harmony.prompt import conversation_messages
from antiphon.router.harmony.recipients import ToolPolicy
from antiphon.router.harmony.vocabulary import Vocabulary, load_vocabulary


def today() -> str:
    """The current date in UTC, ``YYYY-MM-DD``."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


class HarmonyFormatter:
    """Renders prompts and makes parsers; implements ``ChatFormatter``.

    ``current_date`` gives the date that prompts name, ``YYYY-MM-DD``; a constant one makes prompts, and with
    them cached prefixes, independent of the day.
    """

    def __init__(self, vocabulary: Vocabulary | None = None, current_date: Callable[[], str] = today) -> None:
        self.vocabulary = vocabulary or load_vocabulary()
        self._current_date = current_date

    def __reduce__(self) -> tuple[type[HarmonyFormatter], tuple[None, Callable[[], str]]]:
        """Another process has the same formatter with the vocabulary that ships with the project."""
        if self.vocabulary is not load_vocabulary():
            raise TypeError("a formatter with a vocabulary of its own cannot go to another process")
        return HarmonyFormatter, (None, self._current_date)

    @classmethod
    def configured(cls, config: RouterConfig) -> HarmonyFormatter:
        """The formatter of a deployment: with its fixed date, if it has one."""
        fixed = config.current_date
        return cls(current_date=today if fixed is None else fixed.isoformat)

    @property
    def vocabulary_size(self) -> int:
        """Token ids are in ``range(vocabulary_size)``."""
        return self.vocabulary.size

    @property
    def end_of_text_ids(self) -> tuple[int, ...]:
        """Ids that end a plain text completion."""
        return (END_OF_TEXT, RETURN)

    def render(self, conversation: Conversation) -> RenderedPrompt:
        """Token ids of a conversation up to ``<|start|>assistant``.

        Raises:
            InvalidPrompt: the conversation breaks a rule of the format; names the field.
        """
        ids: list[int] = []
        for message in conversation_messages(conversation, self._current_date()):
            ids += message.token_ids(self.vocabulary)
        ids += (START, *self.vocabulary.encode("assistant"))
        choice = conversation.tool_choice
        chosen = choice.mode is ToolChoiceMode.NAMED or choice.allowed is not None
        return RenderedPrompt(
            token_ids=ids,
            stop_token_ids=STOP_IDS,
            tool_names=frozenset(tool.name for tool in conversation.offered_tools),
            tool_calls_allowed=choice.mode is not ToolChoiceMode.NONE,
            callable_tools=frozenset(t.name for t in conversation.callable_tools) if chosen else None,
            max_tool_calls=None if conversation.parallel_tool_calls else 1,
            grammar=answer_grammar(conversation, self.vocabulary),
        )

    def parser(self, prompt: RenderedPrompt) -> HarmonyParser:
        """A new parser for one answer to ``prompt``."""
        policy = ToolPolicy(
            names=prompt.tool_names or None,
            surface=prompt.tool_calls_allowed,
            allowed=prompt.callable_tools,
            max_calls=prompt.max_tool_calls,
        )
        return HarmonyParser(self.vocabulary.pieces, policy)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; marker text such as ``<|end|>`` stays text."""
        return self.vocabulary.encode(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, for any id below ``vocabulary_size``."""
        return self.vocabulary.pieces[token_id]

    def is_marker(self, token_id: int) -> bool:
        """Whether the token is a marker, used or reserved, and not text."""
        return token_id >= FIRST_SPECIAL
