"""How much of a request goes to its workers: every choice takes its prompt and its grammar along."""

from __future__ import annotations

import msgspec

from antiphon.protocol.grammar import GrammarSpec
from antiphon.router.openai.errors import invalid

MAX_SENT_BYTES = 20 * 1024 * 1024
"""Of all choices of one request. A link is given up, with everybody's requests, where its worker has more
than 64 MiB still to take. 128 choices of 32,768 tokens are possible."""
_TOKEN_BYTES = 5
"""Of the longest token id on the wire."""


def check_sent_size(prompt_tokens: int, choices: int, grammar: GrammarSpec | None = None) -> None:
    """Refuse what would fill the link to a worker; ``prompt_tokens`` are those of all choices together.

    Raises:
        ApiError: 400 that names ``n``.
    """
    grammar_bytes = 0 if grammar is None else len(msgspec.msgpack.encode(grammar))
    size = prompt_tokens * _TOKEN_BYTES + choices * grammar_bytes
    if size > MAX_SENT_BYTES:
        each = size // choices
        possible = max(MAX_SENT_BYTES // each, 1)
        raise invalid(
            f"{choices} choices of a request of this size are too many; {possible} are possible.", "n"
        )
