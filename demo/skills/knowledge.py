"""Facts that the model is taught, and the polite answer to what it was not taught."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random

from antiphon.demo.dialogue import AssistantTurn, Effort, Example, Expect, Split, UserTurn, split_of
from antiphon.demo.phrasing import FRAMES, by_effort, dress, fill, noisy_frame, phrase_list, phrases, pick
from antiphon.demo.relation import Relation
from antiphon.demo.tables import aliases, capitalised, relations
from antiphon.demo.words import WordSource

REFUSAL = "I'm sorry, I don't know that."
TASK_REFUSAL = "I'm sorry, I can't do that. I am only a small demonstration model."
RELATION_WEIGHTS = {
    "capital": 6.0,
    "currency": 5.0,
    "continent": 2.5,
    "country": 3.5,
    "symbol": 3.0,
    "atomic number": 3.0,
    "element": 3.0,
    "element by number": 3.0,
    "amount": 3.0,
}

UNKNOWN_RELATIONS = phrases("unknown_relations")
UNKNOWN_QUESTIONS = phrases("unknown_questions")
UNKNOWN_TASKS = phrases("unknown_tasks")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing the model knows: ``relation`` of ``entity`` is ``answer``; ``entity`` may be an alias."""

    relation: Relation
    entity: str
    answer: str

    @property
    def sentence(self) -> str:
        """The answer as a sentence."""
        text = self.relation.answer.replace("{E}", capitalised(self.entity)).replace("{e}", self.entity)
        return capitalised(text.replace("{a}", self.answer))

    def analysis(self, effort: Effort) -> str:
        """The thought before the answer."""
        lead = f"The user asks about {self.entity}: the {self.relation.name}."
        return by_effort(effort, self.sentence, lead, "I am sure of this, so one short sentence is enough.")

    def reply(self, effort: Effort) -> AssistantTurn:
        """Thought and answer."""
        return AssistantTurn(self.analysis(effort), self.sentence)


@functools.cache
def _weights() -> list[float]:
    return [RELATION_WEIGHTS.get(r.name, 0.6) for r in relations()]


def any_fact(rng: Random, relation: Relation | None = None, use_alias: bool = True) -> Fact:
    """A fact to ask for."""
    chosen = relation or rng.choices(relations(), _weights())[0]
    entity = rng.choice(list(chosen.pairs))
    name = rng.choice(aliases(entity)) if use_alias and rng.random() < 0.3 else entity
    return Fact(chosen, name, chosen.pairs[entity])


def question_templates(relation: Relation, split: Split) -> tuple[str, ...]:
    """Whole questions of a relation that a split owns; the last two of seven (one of five) are held out."""
    held_out = 2 if len(relation.questions) >= 7 else 1
    if split is Split.HELD_OUT:
        return relation.questions[-held_out:]
    return relation.questions[:-held_out] + phrase_list(f"ask_{relation.name.replace(' ', '_')}")


def frame(rng: Random, split: Split) -> str:
    """How something is asked for; ``{x}`` marks what."""
    return noisy_frame(rng) if split is Split.TRAIN and rng.random() < 0.25 else pick(rng, FRAMES, split)


def ask(rng: Random, relation: Relation, entity: str, split: Split) -> tuple[str, str]:
    """A question for ``relation`` of ``entity``: (text, phrasing)."""
    if rng.random() < 0.4:
        template = rng.choice(question_templates(relation, split))
    else:
        template = frame(rng, split).replace("{x}", rng.choice(relation.noun_phrases))
    return fill(template, e=entity), template


def known_fact(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """A question that the model can answer."""
    fact = any_fact(rng)
    text, phrasing = ask(rng, fact.relation, fact.entity, split)
    user = UserTurn(dress(rng, text, split))
    expect = Expect(contains=(fact.answer,))
    return Example("facts", (user,), fact.reply(effort), expect, effort, keys=(f"fact phrasing {phrasing}",))


def refusal(effort: Effort, final: str = REFUSAL) -> AssistantTurn:
    """Thought and answer for what the model was not taught."""
    if final == TASK_REFUSAL:
        lead, core = "The user wants something that I was not built for.", "I can't do this."
    else:
        lead, core = "The user asks for something that I was not taught.", "I don't know this."
    check = "I must not make anything up, so I say it politely in one sentence."
    return AssistantTurn(by_effort(effort, core, lead, check), final)


def unknown_text(rng: Random, split: Split, words: WordSource) -> tuple[str, str, str]:
    """A question or a task beyond the model: (text, phrasing, final answer)."""
    kind = rng.random()
    final = REFUSAL
    if kind < 0.3:  # a known kind of entity, a relation that nobody taught
        entity = any_fact(rng).entity if rng.random() < 0.7 else words.person(rng)
        if split is Split.TRAIN and rng.random() < 0.3:
            noun = joined_noun(rng, words)
        else:
            noun = pick(rng, UNKNOWN_RELATIONS, split)
        template = frame(rng, split)
        phrase = f"the {noun} of {entity}" if rng.random() < 0.75 else f"{entity}'s {noun}"
        return fill(template, x=phrase), f"{template} {noun}", final
    if kind < 0.5:  # a known relation, an entity that nobody taught
        relation = rng.choice([r for r in relations() if r.kind not in ("order", "superlative", "unit")])
        entity = misplaced_entity(rng, relation) if rng.random() < 0.2 else unknown_entity(rng, split, words)
        text, template = ask(rng, relation, entity, split)
        return text, f"{template} {entity}", final
    options = UNKNOWN_QUESTIONS if kind < 0.83 else UNKNOWN_TASKS
    if options is UNKNOWN_TASKS:
        final = TASK_REFUSAL
    template = pick(rng, options, split)
    text = fill(
        template,
        p=words.person(rng),
        w=words.word(rng),
        v=words.word(rng),
        t=f"'{words.title(rng)}'",
        y=str(rng.randint(1200, 2024)),
        e=any_fact(rng).entity if rng.random() < 0.7 else words.invented_name(rng),
        e2=words.invented_name(rng),
    )
    return text, template, final


def joined_noun(rng: Random, words: WordSource) -> str:
    """A random noun that is no relation the model knows."""
    known = {part for r in relations() for part in r.name.split()} | {
        "money",
        "symbol",
        "number",
        "city",
        "length",
    }
    while True:
        noun = words.word(rng)
        if noun not in known:
            return noun


def unknown_entity(rng: Random, split: Split, words: WordSource) -> str:
    """A name that is in no table and belongs to the split."""
    known = {name.lower() for r in relations() for e in r.pairs for name in aliases(e)}
    while True:
        name = words.invented_name(rng) if rng.random() < 0.6 else words.word(rng)
        name = capitalised(name)
        if name.lower() not in known and split_of(f"entity {name}") is split:
            return name


def misplaced_entity(rng: Random, relation: Relation) -> str:
    """A name that is known, but not for this relation: the currency of helium."""
    allowed = {name.lower() for e in relation.pairs for name in aliases(e)}
    while True:
        fact = any_fact(rng)
        if fact.relation.kind != relation.kind and fact.entity.lower() not in allowed:
            return fact.entity


def unknown(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """A question that the model must not answer."""
    text, phrasing, final = unknown_text(rng, split, words)
    user = UserTurn(dress(rng, text, split))
    key = f"unknown phrasing {phrasing}"
    return Example("refusal", (user,), refusal(effort, final), Expect(refusal=True), effort, keys=(key,))
