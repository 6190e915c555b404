"""Conversations of several turns: follow-up questions, running sums, remembered facts, changes of subject."""

from __future__ import annotations

import dataclasses
from random import Random

from antiphon.demo.dialogue import AssistantTurn, Effort, Example, Expect, Split, Turn, UserTurn
from antiphon.demo.phrasing import by_effort, fill, phrase_list, phrases, pick
from antiphon.demo.skills import arithmetic as sums
from antiphon.demo.skills import copying as lists
from antiphon.demo.skills.chat import chat
from antiphon.demo.skills.knowledge import Fact, any_fact, ask, known_fact, refusal, unknown
from antiphon.demo.tables import aliases, relation
from antiphon.demo.words import FIRST_NAMES, WordSource

OTHER_RELATION, OTHER_ENTITY = phrases("other_relation"), phrases("other_entity")
UNKNOWN_FOLLOW_UP = phrases("unknown_follow_up")
RUNNING = {"+": phrases("running_add"), "-": phrases("running_subtract"), "*": phrases("running_multiply")}
NOTED = "I will remember that."
MEMORIES = (
    ("name", "Nice to meet you, {x}!", "Your name is {x}."),
    ("favorite_color", NOTED, "Your favorite color is {x}."),
    ("city", NOTED, "You live in {x}."),
    ("word", NOTED, "The word is {x}."),
    ("number", NOTED, "The number is {x}."),
)
"""What the user tells, how it is acknowledged, and the answer when it is asked for."""
COLORS = phrase_list("colors")
LINKED = {"country": ("capital", "currency", "continent"), "element": ("symbol", "atomic number")}


def _said(example: Example) -> tuple[Turn, ...]:
    """An example as part of a history: its turns and its answer, without the thought."""
    return (*example.turns, AssistantTurn("", example.reply.final))


def fact_chain(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """A question, then one to three follow-ups that change the relation or the entity."""
    kind = rng.choices(("country", "element"), (3, 1))[0]
    names = LINKED[kind]
    start = relation(rng.choice(names))
    fact = any_fact(rng, start)
    text, _ = ask(rng, start, fact.entity, split if rng.random() < 0.5 else Split.TRAIN)
    turns: list[Turn] = [UserTurn(text)]
    keys = []
    if kind == "country" and rng.random() < 0.15:  # begin from the capital
        capital = any_fact(rng, relation("country"))
        text, _ = ask(rng, capital.relation, capital.entity, Split.TRAIN)
        turns = [UserTurn(text)]
        fact = Fact(capital.relation, capital.answer, capital.answer)
        turns.append(AssistantTurn("", capital.sentence))
        text, phrasing, fact = _other_relation(rng, split, fact, names)
        turns.append(UserTurn(text))
        keys.append(f"follow-up {phrasing}")
    for _ in range(rng.choice((1, 1, 1, 2, 3)) - len(keys)):
        turns.append(AssistantTurn("", fact.sentence))
        change = _other_relation if rng.random() < 0.55 else _other_entity
        text, phrasing, fact = change(rng, split, fact, names)
        turns.append(UserTurn(text))
        keys.append(f"follow-up {phrasing}")
    reply, expect = fact.reply(effort), Expect(contains=(fact.answer,))
    return Example("multi_turn", tuple(turns), reply, expect, effort, keys=tuple(keys))


def _other_relation(rng: Random, split: Split, fact: Fact, names: tuple[str, ...]) -> tuple[str, str, Fact]:
    other = relation(rng.choice([name for name in names if name != fact.relation.name]))
    base = next(e for e in other.pairs if fact.entity in aliases(e))
    phrasing = pick(rng, OTHER_RELATION, split)
    return fill(phrasing, r=other.name), phrasing, Fact(other, fact.entity, other.pairs[base])


def _other_entity(rng: Random, split: Split, fact: Fact, names: tuple[str, ...]) -> tuple[str, str, Fact]:
    new = any_fact(rng, fact.relation)
    phrasing = pick(rng, OTHER_ENTITY, split)
    return fill(phrasing, x=new.entity), phrasing, new


def unknown_follow_up(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """A known fact first, then something that the model was not taught."""
    first = known_fact(rng, Split.TRAIN, effort, words)
    last = unknown(rng, split, effort, words)
    turns = (*_said(first), *last.turns)
    return dataclasses.replace(last, skill="multi_turn", turns=turns)


def running_sum(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """A sum, then one or two operations on its result."""
    while True:
        a, b = sums.operands_of(rng, "+", Split.TRAIN)
        if a + b < 200:
            break
    text = fill(pick(rng, sums.QUESTIONS["+"], Split.TRAIN), a=str(a), b=str(b), n="Anna", w="books")
    turns: list[Turn] = [UserTurn(text)]
    operator, total, keys = "+", a + b, []
    for _ in range(rng.choice((1, 1, 2))):
        turns.append(AssistantTurn("", sums.solve(a, b, operator)[1]))
        operator = rng.choice("++-*" if 0 < total < 100 else "++-" if total else "+")
        a, b = total, rng.randint(2, 9) if operator == "*" else rng.randint(1, min(max(total, 1), 99))
        phrasing = pick(rng, RUNNING[operator], split)
        turns.append(UserTurn(fill(phrasing, b=str(b))))
        keys.append(f"follow-up {phrasing}")
        total = {"+": a + b, "-": a - b, "*": a * b}[operator]
    answer = sums.reply(a, b, operator, effort)
    return Example(
        "multi_turn", tuple(turns), answer, Expect(contains=(f"= {total}",)), effort, keys=tuple(keys)
    )


def memory(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """Something the user said, other talk, and then a question about it."""
    what, acknowledgement, answer = rng.choice(MEMORIES)
    value = {
        "name": rng.choice(FIRST_NAMES),
        "favorite_color": rng.choice(COLORS),
        "city": rng.choice(list(relation("capital").pairs.values())),
        "word": words.word(rng),
        "number": str(rng.randint(0, 999)),
    }[what]
    turns: list[Turn] = [
        UserTurn(fill(rng.choice(phrase_list(f"telling_{what}")), x=value)),
        _acknowledged(acknowledgement, value),
    ]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        maker = rng.choice((known_fact, sums.arithmetic, chat))
        turns.extend(_said(maker(rng, Split.TRAIN, effort, words)))
    if rng.random() < 0.15:  # only the acknowledgement is to be learnt
        reply = AssistantTurn(_telling_thought(effort), acknowledgement.replace("{x}", value))
        expect = Expect(contains=(acknowledgement.replace("{x}", value).rstrip("!."),))
        return Example("multi_turn", (turns[0],), reply, expect, effort, keys=())
    phrasing = pick(rng, phrases(f"memory_{what}"), split)
    turns.append(UserTurn(phrasing))
    core = f"The user told me: {value}."
    thought = by_effort(
        effort, core, "The user asks for something said before.", "I look it up in our conversation."
    )
    reply = AssistantTurn(thought, answer.replace("{x}", value))
    return Example(
        "multi_turn", tuple(turns), reply, Expect(contains=(value,)), effort, keys=(f"follow-up {phrasing}",)
    )


def _acknowledged(text: str, value: str) -> AssistantTurn:
    return AssistantTurn("", text.replace("{x}", value))


def _telling_thought(effort: Effort) -> str:
    return by_effort(
        effort, "I keep this in mind.", "The user tells me something.", "It may be asked for later."
    )


def word_follow_up(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """A list of words, then another task on the same list."""
    chosen = lists.words_of(rng, split, words, least=2, most=7)
    first = pick(rng, lists.LAYOUTS["repeat"], Split.TRAIN)
    turns: tuple[Turn, ...] = (
        UserTurn(fill(first, x=" ".join(chosen))),
        AssistantTurn("", " ".join(chosen)),
    )
    task = rng.choice(("reverse", "count", "repeat"))
    phrasing = pick(rng, phrases(f"again_{task}"), split)
    reply, expected = lists.reply(task, chosen, effort)
    expect = Expect(contains=(expected,)) if task == "count" else Expect(equals=expected)
    return Example(
        "multi_turn", (*turns, UserTurn(phrasing)), reply, expect, effort, keys=(f"follow-up {phrasing}",)
    )


def change_of_subject(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """One to three finished exchanges, then a question that has nothing to do with them."""
    makers = (known_fact, sums.arithmetic, lists.copying, chat, unknown)
    turns: list[Turn] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        turns.extend(_said(rng.choice(makers)(rng, Split.TRAIN, effort, words)))
    last = rng.choice(makers)(rng, split, effort, words)
    return dataclasses.replace(last, skill="multi_turn", turns=(*turns, *last.turns))


def refused_follow_up(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """A follow-up about a relation that was never taught."""
    fact = any_fact(rng, relation(rng.choice(LINKED["country"])))
    text, _ = ask(rng, fact.relation, fact.entity, Split.TRAIN)
    phrasing = pick(rng, OTHER_RELATION, split)
    last = fill(phrasing, r=pick(rng, UNKNOWN_FOLLOW_UP, split))
    turns = (UserTurn(text), AssistantTurn("", fact.sentence), UserTurn(last))
    return Example(
        "multi_turn", turns, refusal(effort), Expect(refusal=True), effort, keys=(f"follow-up {phrasing}",)
    )


def conversation(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """A conversation of several turns."""
    makers = (
        fact_chain,
        running_sum,
        memory,
        word_follow_up,
        change_of_subject,
        unknown_follow_up,
        refused_follow_up,
    )
    return rng.choices(makers, (8, 3, 4, 3, 5, 0.7, 0.8))[0](rng, split, effort, words)
