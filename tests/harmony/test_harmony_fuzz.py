"""Random token sequences: no exception, no marker shown, no text of a message lost, steps do not matter."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.protocol.messages import FinishReason
from antiphon.router.harmony.markers import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    END_OF_TEXT,
    FIRST_SPECIAL,
    MESSAGE,
    RETURN,
    START,
    TERMINATORS,
    VOCABULARY_SIZE,
)
from antiphon.router.harmony.recipients import ToolPolicy
from antiphon.router.harmony.vocabulary import Vocabulary, load_vocabulary

SEQUENCES = 100_000
MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL, END_OF_TEXT)
WORDS = (
    *(
        "assistant",
        "user",
        "analysis",
        "commentary",
        "final",
        " to=",
        "to",
        "=",
        "functions",
        ".",
        " functions.",
    ),
    *("f", " json", "json", "code", " code", '{"', "}", "[", "?", " ", "\n", ":", "python", "browser.search"),
)
POLICIES = (
    ToolPolicy(),
    ToolPolicy(frozenset({"f", "python"})),
    ToolPolicy(frozenset({"f"}), surface=False),
    ToolPolicy(None, max_calls=1),
)
MARKER_TEXT = re.compile(r"<\|\w+\|>")


def _alphabet(vocabulary: Vocabulary) -> list[list[int]]:
    """Kinds of tokens, each as likely as the others."""
    words = [vocabulary.encode(word)[0] for word in WORDS]
    split = [token for token in range(20_000) if _is_partial(vocabulary.pieces[token])]
    # Pieces with which text could spell a marker are left out: text may do that, markers may not.
    plain = [token for token in range(0, FIRST_SPECIAL, 97) if b"|" not in vocabulary.pieces[token]]
    strange = [200_013, 200_500, 199_998, VOCABULARY_SIZE - 1, VOCABULARY_SIZE, -1, 1 << 40]
    return [list(MARKERS), list(MARKERS), words, words, plain, plain, split, strange]


def _is_partial(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return True
    return False


def _body_texts(vocabulary: Vocabulary, token_ids: Sequence[int]) -> list[str]:
    """The texts that stand between ``<|message|>`` and the next marker that ends or begins a message."""
    texts: list[list[bytes]] = []
    in_body = False
    for token in token_ids:
        if token == MESSAGE and not in_body:
            texts.append([b""])
            in_body = True
        elif token in TERMINATORS or token in (START, CHANNEL):
            in_body = False
        elif in_body and FIRST_SPECIAL <= token < VOCABULARY_SIZE:
            texts[-1].append(b"")
        elif in_body:
            texts[-1][-1] += vocabulary.pieces[token] if 0 <= token < FIRST_SPECIAL else b"\xff"
    return ["".join(run.decode("utf-8", "replace") for run in runs) for runs in texts]


def _check(
    vocabulary: Vocabulary,
    parse_tokens: Callable[..., Any],
    token_ids: list[int],
    steps: list[int],
    tools: ToolPolicy,
) -> None:
    reason = FinishReason.LENGTH if len(token_ids) % 2 else FinishReason.STOP
    answer = parse_tokens(token_ids, steps, tools, reason)
    whole = parse_tokens(token_ids, [1_000_000], tools, reason)
    assert answer.merged == whole.merged
    assert answer.outcome.repairs == whole.outcome.repairs
    assert answer.outcome.reasoning_tokens == whole.outcome.reasoning_tokens
    shown = [answer.content, answer.reasoning, *(arguments for _, arguments in answer.calls)]
    assert not any(MARKER_TEXT.search(text) for text in shown)
    for text in _body_texts(vocabulary, token_ids):
        assert any(text in one for one in shown), text
    assert all(name for name, _ in answer.calls)
    if not tools.surface:
        assert answer.calls == []
    if tools.max_calls is not None:
        assert len(answer.calls) <= tools.max_calls


def test_a_hundred_thousand_random_sequences(
    vocabulary: Vocabulary, parse_tokens: Callable[..., Any]
) -> None:
    order = random.Random(20_260)
    kinds = _alphabet(vocabulary)
    for _ in range(SEQUENCES):
        token_ids = [order.choice(order.choice(kinds)) for _ in range(order.randint(1, 24))]
        steps = [order.randint(1, 5) for _ in range(3)]
        tools = order.choice(POLICIES)
        try:
            _check(vocabulary, parse_tokens, token_ids, steps, tools)
        except BaseException as error:
            error.add_note(f"token ids {token_ids}, steps {steps}, tools {tools}")
            raise


_TOKENS = st.lists(st.one_of([st.sampled_from(kind) for kind in _alphabet(load_vocabulary())]), max_size=40)


@settings(
    max_examples=1500,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)
@given(_TOKENS, st.lists(st.integers(1, 7), min_size=1, max_size=4), st.sampled_from(POLICIES))
def test_random_sequences_shrink(
    vocabulary: Vocabulary,
    parse_tokens: Callable[..., Any],
    token_ids: list[int],
    steps: list[int],
    tools: ToolPolicy,
) -> None:
    _check(vocabulary, parse_tokens, token_ids, steps, tools)
