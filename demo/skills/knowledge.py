"""Facts that the model is taught, and the polite answer to what it was not taught."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random

from antiphon.demo.dialogue import AssistantTurn, Effort, Example, Expect, Split, UserTurn, split_of
from antiphon.demo.phrasing import FRAMES, by_effort, dress, fill, pick
from antiphon.demo.tables import Relation, aliases, capitalised, relations
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

UNKNOWN_RELATIONS = {
    Split.TRAIN: (
        "population", "president", "prime minister", "king", "national anthem", "highest mountain", "longest river",
        "flag", "area", "language", "official language", "largest lake", "national dish", "history", "economy",
        "time zone", "phone code", "oldest city", "best restaurant", "coat of arms", "head of state", "climate",
        "melting point", "boiling point", "density", "color", "price", "discoverer", "inventor", "mass", "radius",
        "distance", "moons", "temperature", "age", "weight", "height", "email address", "phone number", "birthday",
        "author", "director", "founder", "owner", "meaning", "origin", "birthplace", "wife", "husband", "mother",
        "favorite food", "secret", "password", "number of inhabitants", "smallest island", "main export", "religion",
        "stock price", "score", "winner", "captain", "nickname", "address", "opening hours", "second largest city",
    ),
    Split.HELD_OUT: (
        "largest city", "queen", "national animal", "freezing point", "gravity", "biggest river", "chief executive",
        "most famous singer", "football champion", "number of islands", "oldest university", "life expectancy",
    ),
}  # fmt: skip
UNKNOWN_QUESTIONS = {
    Split.TRAIN: (
        "Who is {p}?", "Who was {p}?", "When was {p} born?", "Where does {p} live?", "How old is {p}?",
        "Who invented the {w}?", "Who wrote {t}?", "When did the {w} war end?", "Why is the {w} so {v}?",
        "What happened in {y}?", "Who won the {w} cup in {y}?", "How many people live in {e}?", "Who rules {e}?",
        "Which languages are spoken in {e}?", "Who discovered {e}?", "How tall is the {w} of {e}?",
        "What is the best {w} in {e}?", "How much does a {w} cost?", "Where can I buy a {w}?", "What is a {w}?",
        "How do I repair a {w}?", "How far is it from {e} to {e2}?", "When was {e} founded?", "What is {t} about?",
        "What did {p} do in {y}?", "Is {p} married?", "What does {w} mean?", "How big is {e}?", "Why do {w}s {v}?",
        "Who directed {t}?", "What year was the {w} invented?", "Explain the {w} to me.", "Which {w} is the best?",
        "How many {w}s are there in {e}?", "What is the {w} of {p}?", "Who owns the {w}?", "Did {p} win in {y}?",
        "Tell me about {p}.", "Tell me about {e}.", "Tell me about the {w}.", "What will happen tomorrow in {e}?",
        "Will it rain in {e} tomorrow?", "What's the weather in {e}?", "What is the weather like in {e} today?",
        "What is the news today?", "What time is it?", "What time is it in {e}?", "Where is {p}?", "Where am I?",
        "How is the stock of {p} doing?", "What should I eat in {e}?", "Who sings {t}?", "What is {p} famous for?",
    ),
    Split.HELD_OUT: (
        "Who painted {t}?", "When did {p} die?", "Which team won the {w} league?", "What is the {v} {w} made of?",
        "Who founded {e}?", "How long does a flight from {e} to {e2} take?", "Why did {p} leave {e}?",
        "Who is the {w} of {e}?", "How fast is a {w}?", "What is the theory of {w}?", "How deep is the {w}?",
        "Is it sunny in {e} right now?",
    ),
}  # fmt: skip
UNKNOWN_TASKS = {
    Split.TRAIN: (
        "Write a poem about {w}.", "Write a story about a {w}.", "Translate '{w} {v}' into French.",
        "Write a Python program that sorts {w}s.", "Draw a {w}.", "Summarize {t}.", "Write an essay on {w}.",
        "Tell me a joke.", "Tell me a joke about {w}s.", "Sing a song.", "Write a haiku.", "Plan a trip to {e}.",
        "Recommend a book about {w}.", "Give me a recipe with {w}.", "Write an email to {p}.", "Fix my code.",
        "Play a game with me.", "Write a SQL query for {w}s.", "Send a message to {p}.", "Order a {w} for me.",
        "Solve the equation x^2 = {y}.", "Prove that {w} is {v}.", "Write a letter to my {w}.", "Debug this program.",
        "Make a list of {w}s.", "Design a {w} for me.", "Set an alarm.", "Open the {w}.", "Book a {w} for tomorrow.",
    ),
    Split.HELD_OUT: (
        "Compose a song about {w}.", "Translate {w} to German.", "Write a short story.", "Paint a {w} for me.",
        "Write me a limerick.", "Call {p} for me.", "Write a JavaScript function for {w}s.", "Rewrite this text.",
    ),
}  # fmt: skip


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
    """Whole questions of a relation that belong to a split: the last two of seven (one of five) are held out."""
    held_out = 2 if len(relation.questions) >= 7 else 1
    return relation.questions[:-held_out] if split is Split.TRAIN else relation.questions[-held_out:]


def ask(rng: Random, relation: Relation, entity: str, split: Split) -> tuple[str, str]:
    """A question for ``relation`` of ``entity``: (text, phrasing)."""
    if rng.random() < 0.4:
        template = rng.choice(question_templates(relation, split))
    else:
        template = pick(rng, FRAMES, split).replace("{x}", rng.choice(relation.noun_phrases))
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
        template = pick(rng, FRAMES, split)
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
