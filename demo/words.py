"""Words for copying, names of people and invented places, all made of tokens that the model keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random

COMMON_WORDS = tuple(
    "apple banana cherry orange lemon grape peach melon berry tomato potato carrot onion bread butter cheese honey "
    "sugar salt pepper coffee tea milk water juice wine soup rice pasta pizza cake cookie chocolate cat dog horse cow "
    "sheep goat pig chicken duck goose bird fish shark whale lion tiger bear wolf fox rabbit mouse rat snake frog "
    "spider bee ant butterfly monkey elephant giraffe zebra red blue green yellow black white brown pink purple gray "
    "gold silver tree flower grass leaf forest river lake sea ocean mountain hill valley island desert beach sky sun "
    "moon star cloud rain snow wind storm fire earth stone sand house door window wall roof floor room kitchen table "
    "chair bed lamp clock mirror picture book pen pencil paper letter word sentence story poem song music guitar piano "
    "violin drum dance game ball car bus train plane boat ship bicycle road street bridge city town village country "
    "king queen prince doctor teacher student farmer baker driver pilot sailor soldier friend brother sister mother "
    "father child baby man woman hand foot head eye ear nose mouth arm leg heart brain happy sad angry tired hungry "
    "big small tall short long wide deep fast slow hot cold warm cool new old young good bad strong weak rich poor "
    "light dark loud quiet hard soft clean dirty full empty open closed walk run jump swim fly climb read write speak "
    "listen sing eat drink sleep dream think learn teach build break find lose give take buy sell love hope winter "
    "spring summer autumn morning evening night day week month year hour minute second one two three four five six "
    "seven eight nine ten alpha beta gamma delta north south east west left right up down computer phone camera robot "
    "rocket planet engine wheel key lock box bag bottle cup plate knife fork spoon shirt shoe hat coat dress ring hello "
    "world the quick jumps over lazy and my your our this that these those is are was were has have in on at by with "
    "from into about yes no maybe never always often here there now then today tomorrow yesterday".split()
)
FIRST_NAMES = tuple(
    "Anna Ben Clara David Emma Frank Grace Henry Irene Jack Kate Leo Maria Nick Olivia Paul Rosa Sam Tina Victor Alice "
    "Bob Carol Dan Eva Fred George Helen Ivan Julia Karl Laura Mark Nina Oscar Peter Rita Steve Tom Vera Will Zoe Max "
    "Lisa John Jane Mary James Robert Sarah Linda Michael Ali Omar Maya Ravi Chen Yuki Hans Lena Marco Pablo".split()
)
LAST_NAMES = tuple(
    "Smith Jones Brown Miller Davis Wilson Moore Taylor Martin Clark Lewis Walker Hall Young King Wright Hill Green "
    "Adams Baker Carter Cooper Fisher Foster Gray Hunt Kelly Mason Palmer Porter Reed Stone Wood Bell Cole".split()
)
SYLLABLES = tuple(
    "ba be bi bo da de do du fa fe fo ga go ka ke ki ko la le li lo ma me mi mo na ne no pa pe po ra re ri ro sa se si "
    "so ta te ti to va ve vi vo za zo bar dor gan lan mar nor ran sal tan var zor bel del fel gor kal lor mon tor".split()
)
ENDINGS = ("", "ia", "land", "stan", "ville", "burg", "on", "ium", "ar", "os", "is", "ton")
_PLAIN = re.compile(r"[a-z]{2,14}")


@dataclass(frozen=True, slots=True)
class WordSource:
    """The words that examples are made of.

    Attributes:
        vocabulary: words that are single tokens after a space, most frequent first, and whose other spellings
            (without the space, capitalised) consist of kept tokens too.
    """

    vocabulary: tuple[str, ...]

    def word(self, rng: Random) -> str:
        """A word: everyday ones and the whole vocabulary in equal parts."""
        return rng.choice(COMMON_WORDS if rng.random() < 0.4 else self.vocabulary)

    def distinct_words(self, rng: Random, count: int) -> list[str]:
        """``count`` different words."""
        chosen: dict[str, None] = {}
        while len(chosen) < count:
            chosen[self.word(rng)] = None
        return list(chosen)

    def person(self, rng: Random) -> str:
        """A first name, or a first and a last name."""
        first = rng.choice(FIRST_NAMES)
        return f"{first} {rng.choice(LAST_NAMES)}" if rng.random() < 0.6 else first

    def title(self, rng: Random) -> str:
        """A made-up title of two or three words."""
        return " ".join(w.capitalize() for w in self.distinct_words(rng, rng.randint(2, 3)))

    def invented_name(self, rng: Random) -> str:
        """A name that sounds like a place and is none."""
        body = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 3)))
        return (body + rng.choice(ENDINGS)).capitalize()


def is_plain_word(text: str) -> bool:
    """Whether ``text`` is a lower-case word of 2 to 14 letters."""
    return _PLAIN.fullmatch(text) is not None
