"""How a user may put things: frames around a noun phrase, greetings before, thanks after, sloppy typing.

The texts are in ``phrases.json``, each under the split that owns it.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from random import Random
from typing import Any

from antiphon.demo.dialogue import Effort, Split

PHRASES_FILE = Path(__file__).with_name("phrases.json")
Phrases = dict[Split, tuple[str, ...]]


@functools.cache
def _file() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(PHRASES_FILE.read_text(encoding="utf-8"))
    return content


def phrases(name: str) -> Phrases:
    """The phrasings called ``name`` of either split."""
    return {split: tuple(_file()["phrases"][name][split]) for split in Split}


def phrase_list(name: str) -> tuple[str, ...]:
    """A list of words or texts that both splits use."""
    return tuple(_file()["lists"][name])


FRAMES = phrases("frames")
OPENINGS = phrases("openings")
CLOSINGS = phrases("closings")
FILLERS = phrase_list("fillers")
NOISE = phrase_list("noise")


def pick(rng: Random, options: Phrases, split: Split) -> str:
    """One of the split's options."""
    return rng.choice(options[split])


def fill(template: str, **values: str) -> str:
    """``template`` with its fields replaced and its first letter in upper case."""
    text = template
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text[:1].upper() + text[1:]


def dress(rng: Random, text: str, split: Split) -> str:
    """``text`` as one of many users types it: with a greeting, thanks, in lower case, or no full stop.

    In training, words that mean nothing are slipped in too, so that no single frame is learnt by heart.
    """
    if split is Split.TRAIN and rng.random() < 0.3:
        text = jittered(rng, text)
    chance = rng.random()
    if chance < 0.12:
        text = pick(rng, OPENINGS, split) + (text if rng.random() < 0.6 else text[:1].lower() + text[1:])
    elif chance < 0.2 and text[-1:] in ".?!":
        text += pick(rng, CLOSINGS, split)
    elif chance < 0.28:
        text = text.lower()
    if rng.random() < 0.1 and text[-1:] in ".?!":
        text = text[:-1]
    if rng.random() < 0.02:
        text += "\n"
    return text


def noisy_frame(rng: Random) -> str:
    """A frame of words that mean nothing, for training: what is asked for is in ``{x}`` alone."""
    before = [rng.choice(NOISE) for _ in range(rng.choice((0, 1, 2, 3, 4, 5)))]
    after = [rng.choice(NOISE) for _ in range(rng.choice((0, 0, 0, 1, 2, 3)))]
    if before and rng.random() < 0.3:
        before[-1] += rng.choice((",", ":", "."))
    return " ".join((*before, "{x}", *after)) + rng.choice(("?", ".", "", ", please."))


def jittered(rng: Random, text: str) -> str:
    """``text`` with one or two fillers between plain words, never inside a name, a number or quotes."""
    parts = text.split(" ")
    for _ in range(rng.choice((1, 1, 2))):
        places = [i for i in range(1, len(parts)) if parts[i - 1].islower() and parts[i][:1].isalpha()]
        at = rng.choice(places) if places and rng.random() < 0.8 else 0
        filler = rng.choice(FILLERS)
        if at == 0:
            parts[0] = (
                parts[0]
                if parts[0][1:2].isupper() or parts[0] == "I"
                else parts[0][:1].lower() + parts[0][1:]
            )
            parts.insert(0, filler.capitalize() + ("," if rng.random() < 0.5 else ""))
        else:
            parts.insert(at, filler)
    return " ".join(parts)


def by_effort(effort: Effort, core: str, lead: str, check: str) -> str:
    """An analysis of the length that the effort asks for: core, lead + core, lead + core + check."""
    if effort is Effort.LOW:
        return core
    if effort is Effort.MEDIUM:
        return f"{lead} {core}"
    return f"{lead} {core} {check}"


def joined(items: list[str]) -> str:
    """Words separated by spaces."""
    return " ".join(items)
