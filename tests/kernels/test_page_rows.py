"""Rows of addresses from pages, as a copy's host part makes them, against sums of Python's integers."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.kv_transfer.peer_memory import PlacedCopies

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "kv_transfer"))

from shared_memory_device import rows_of  # noqa: E402

MOST = 2**63 - 1
FAULTS = {1: "source", 2: "destination", 3: "no multiples"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    target = tmp_path_factory.mktemp("page_rows") / "page_rows.so"
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Werror"]
    headers = ["-I", str(HERE.parents[1] / "kernels" / "ipc")]
    source = str(HERE / "on_host" / "page_rows.cpp")
    subprocess.run(["g++", *options, *headers, source, "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


class BadRun(NamedTuple):
    fault: int
    part: int
    offsets: list[int]
    length: int


def made_rows(library: ctypes.CDLL, parts: list[PlacedCopies]) -> list[list[int]] | BadRun:
    numbers = [
        (
            *(part.entries.ctypes.data, *part.entries.shape, *part.steps),
            *(part.places.ctypes.data, len(part.places), part.length, *part.source, *part.destination),
        )
        for part in parts
    ]
    table, bad = np.array(numbers, dtype=np.int64), np.zeros(5, dtype=np.int64)
    runs = sum(len(part.entries) * len(part.places) for part in parts)
    guard = 7
    rows = np.full((runs + 1, 3), guard, dtype=np.int64)
    addresses = [ctypes.c_void_p(each.ctypes.data) for each in (table, rows, bad)]
    count = library.antiphon_page_rows(addresses[0], len(parts), *addresses[1:])
    assert (rows[-1] == guard).all(), "no more than one row a run"
    if count < 0:
        fault, part, *offsets, length = bad.tolist()
        return BadRun(fault, part, offsets, length)
    made: list[list[int]] = rows[:count].tolist()
    return made


def joined(rows: list[list[int]]) -> list[list[int]]:
    found: list[list[int]] = []
    for source, destination, length in rows:
        if found and [sum(found[-1][::2]), sum(found[-1][1:])] == [source, destination]:
            found[-1][2] += length
        else:
            found.append([source, destination, length])
    return found


NUMBERS = st.integers(0, 6) | st.integers(-2, 40) | st.sampled_from([MOST, -MOST, MOST // 16])
PLACES = st.integers(0, 4).map(lambda word: 16 * word) | st.sampled_from([8, -16, MOST])


@st.composite
def a_part(draw: st.DrawFn) -> PlacedCopies:
    pages = draw(st.booleans())
    wild = draw(st.integers(0, 3)) == 0
    number = NUMBERS if wild else st.integers(0, 6)
    place = PLACES if wild else st.sampled_from([0, 16, 32])
    entries, places = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    columns = [number, number] if pages else [number.map(lambda each: each % 64 * 16), number, number]
    if not pages:
        columns[2] = st.sampled_from([16, 32, 24, 0, -16, MOST]) if wild else st.just(16)
    step = 64 if pages else 16 if not wild else 1
    return PlacedCopies(
        np.array([[draw(column) for column in columns] for _ in range(entries)], dtype=np.int64),
        (64, draw(st.sampled_from([64, 128]))) if pages else (1, step),
        np.array([[draw(place), draw(place)] for _ in range(places)], dtype=np.int64),
        16,
        (4096, 512),
        (8192, 1024),
    )


def expected_rows(parts: list[PlacedCopies]) -> list[list[int]] | tuple[str, list[int]]:
    """The rows; or what is wrong and with which run, in numbers of 64 bits."""
    try:
        return joined([row for part in parts for row in rows_of(part)])
    except ValueError as error:
        reason = str(error)
    run = re.search(r"run \[(.*?)\]", reason)
    assert run is not None
    numbers = [(int(number) + 2**63) % 2**64 - 2**63 for number in run[1].split(",")]
    return next(name for name in FAULTS.values() if name in reason), numbers


@given(parts=st.lists(a_part(), min_size=1, max_size=3))
def test_rows_are_those_of_plain_sums(parts: list[PlacedCopies], library: ctypes.CDLL) -> None:
    expected, found = expected_rows(parts), made_rows(library, parts)
    if isinstance(found, BadRun):
        assert expected == (FAULTS[found.fault], [*found.offsets, found.length])
        assert not isinstance(expected_rows([parts[found.part]]), list)
        assert isinstance(expected_rows(parts[: found.part]), list), "the first such part"
    else:
        assert found == expected


def test_the_runs_of_neighbouring_pages_are_one(library: ctypes.CDLL) -> None:
    pages = np.array([(3, 10), (4, 11), (5, 12), (6, 14), (8, 15)], dtype=np.int64)
    whole = PlacedCopies(pages, (64, 64), np.zeros((1, 2), np.int64), 64, (0, 4096), (8192, 4096))
    begin = 8192
    assert made_rows(library, [whole]) == [
        [192, begin + 640, 192],
        [384, begin + 896, 64],
        [512, begin + 960, 64],
    ]


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("number", [MOST, -MOST - 1, 2**58, -1, 64])
def test_a_page_whose_place_passes_64_bits_is_outside(number: int, side: int, library: ctypes.CDLL) -> None:
    pages = np.zeros((2, 2), dtype=np.int64)
    pages[1, side] = number
    part = PlacedCopies(pages, (64, 64), np.zeros((1, 2), np.int64), 64, (4096, 4096), (16384, 4096))
    bad = made_rows(library, [part])
    assert isinstance(bad, BadRun)
    assert (bad.fault, bad.part, bad.length) == (1 + side, 0, 64)
