"""Stop texts across every way of cutting the text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.router.openai.stop_strings import StopStrings


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    filter_ = StopStrings(stops)
    shown = [filter_.feed(piece) for piece in pieces]
    if filter_.matched is None:
        shown.append(filter_.flush())
    return "".join(shown), filter_.matched


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["abc"], [], "abc"),
        (["a", "b", "c"], ["bc"], "a"),
        (["abab", "abc"], ["ababc"], "ab"),
        (["xaab"], ["aab", "ab"], "x"),
        (["xab"], ["ab", "abc"], "x"),
        (["aa", "ab"], ["aab"], "a"),
        (["ENEND"], ["END"], "EN"),
        (["EN", "D"], ["END"], ""),
        (["EN"], ["END"], "EN"),
    ],
)
def test_examples(pieces, stops, expected):
    assert run(pieces, stops)[0] == expected


@given(
    st.lists(st.text("abE", max_size=4), max_size=12),
    st.lists(st.text("abE", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_pieces_make_no_difference_and_nothing_leaks(pieces, stops):
    text = "".join(pieces)
    shown, matched = run(pieces, stops)
    positions = [text.find(stop) for stop in stops if stop in text]
    if positions:
        # What ends first decides: no later text can make an earlier, longer stop text complete before it.
        assert matched is not None
        assert text.startswith(shown + matched)
        assert not any(stop in shown for stop in stops)
    else:
        assert (shown, matched) == (text, None)


@given(st.lists(st.text("ab", max_size=3), max_size=10), st.text("ab", min_size=1, max_size=5))
def test_no_more_is_held_back_than_could_still_match(pieces, stop):
    filter_ = StopStrings([stop])
    fed = shown = ""
    for piece in pieces:
        fed += piece
        shown += filter_.feed(piece)
        if filter_.matched is not None:
            return
        held = fed[len(shown) :]
        assert stop.startswith(held)
        assert not any(stop.startswith(fed[i:]) for i in range(len(shown)) if fed[i:])
