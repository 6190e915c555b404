"""Files of converted weights, and the folder they are in: checked, and never more than allowed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.model.weight_cache import weight_file
from antiphon.model.weight_cache.checksum import checksum
from antiphon.model.weight_cache.store import NoRoomError, WeightCache
from antiphon.model.weight_cache.weight_file import (
    DamagedCacheError,
    TensorForm,
    WeightFileWriter,
    read_weight_file,
)

CPU = torch.device("cpu")
FORMS = (TensorForm("a", (3, 5), torch.uint8), TensorForm("b", (70_000,), torch.float32))


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache", 10 << 30)


def cached_file(cache: WeightCache, name: str, used_at_s: float, size: int = 1000) -> Path:
    cache.directory.mkdir(exist_ok=True)
    path = cache.path(name)
    path.write_bytes(b"x" * size)
    os.utime(path, (used_at_s, used_at_s))
    return path


def test_what_was_used_longest_ago_goes_first(cache: WeightCache) -> None:
    small = replace(cache, limit_bytes=3500)
    old, middle, new = (cached_file(small, name, at) for name, at in (("c", 10.0), ("a", 20.0), ("b", 30.0)))
    assert [file.path for file in small.make_room(1000, keep={old})] == [middle]
    assert [file.path for file in small.files()] == [old, new]
    with pytest.raises(NoRoomError, match="limit"):
        small.make_room(3000, keep={old})
    assert [file.path for file in small.prune(1000)] == [old]
    assert [file.path for file in small.files()] == [new]


def test_a_disk_is_never_filled(cache: WeightCache, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"total": 100_000, "used": 94_500, "free": 5_500})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    old = cached_file(cache, "old", 1.0)
    assert cache.make_room(500) == []
    with pytest.raises(NoRoomError, match="fill the disk"):
        cache.make_room(2000)
    assert old.exists()
    assert [file.path for file in cache.make_room(1500)] == [old]


def writer(directory: Path) -> WeightFileWriter:
    return WeightFileWriter(directory / "file", FORMS, CPU)


def tensors() -> Iterator[Tensor]:
    yield torch.arange(15, dtype=torch.uint8).view(3, 5)
    yield torch.arange(70_000, dtype=torch.float32)


def write_and_hang(directory: Path, ready: Any) -> None:
    unfinished = writer(directory)
    unfinished.write(next(tensors()))
    ready.set()

    signal.pause()


def test_one_process_writes_and_a_killed_one_is_succeeded(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=write_and_hang, args=(tmp_path, ready))
    process.start()
    try:
        assert ready.wait(60)
        with pytest.raises(BlockingIOError):
            writer(tmp_path)
        assert not weight_file.remove_abandoned(tmp_path / "file.partial")
    finally:
        process.kill()
        process.join()
    assert [path.name for path in tmp_path.iterdir()] == ["file.partial"]
    write_whole(tmp_path)
    found = list(read_weight_file(tmp_path / "file", FORMS, CPU))
    assert all(torch.equal(a, b) for a, b in zip(found, tensors(), strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_nobody_finishes_is_removed(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 1 << 20)
    abandoned = tmp_path / "file.partial"
    abandoned.write_bytes(b"left by a killed process")
    assert cache.prune(0) == []
    assert not abandoned.exists()


def test_a_writer_takes_its_tensors_in_order_and_all_of_them(tmp_path: Path) -> None:
    first, second = tensors()
    unfinished = writer(tmp_path)
    with pytest.raises(ValueError, match="a: "):
        unfinished.write(second)
    unfinished.write(first)
    with pytest.raises(ValueError, match="b: not given"):
        unfinished.commit()
    unfinished.abort()
    assert list(tmp_path.iterdir()) == []


def write_whole(directory: Path) -> Path:
    whole = writer(directory)
    for tensor in tensors():
        whole.write(tensor)
    whole.commit()
    return directory / "file"


@pytest.mark.parametrize("damage", ["bit", "last byte", "header", "checksums", "version", "empty"])
def test_every_kind_of_damage_is_found(damage: str, tmp_path: Path) -> None:
    path = write_whole(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[-3] ^= 0x10
    elif damage == "last byte":
        del data[-1:]
    elif damage == "header":
        data[9] ^= 0x01
    elif damage == "checksums":
        data = data.replace(b'"checksums"', b'"chickens!"', 1)
    elif damage == "version":
        data = data.replace(b'"format_version":"1"', b'"format_version":"0"', 1)
    else:
        data.clear()
    path.write_bytes(data)
    with pytest.raises(DamagedCacheError, match=str(path)):
        list(read_weight_file(path, FORMS, CPU))


def test_a_file_of_other_tensors_is_damaged(tmp_path: Path) -> None:
    write_whole(tmp_path)
    other = (FORMS[0], replace(FORMS[1], shape=(35_000, 2)))
    with pytest.raises(DamagedCacheError, match="b: "):
        list(read_weight_file(tmp_path / "file", other, CPU))
    with pytest.raises(DamagedCacheError, match="other tensors"):
        list(read_weight_file(tmp_path / "file", FORMS[:1], CPU))


def test_a_checksum_sees_every_byte_and_its_place() -> None:
    data = torch.randint(0, 256, ((1 << 20) + (1 << 17) + 13,), dtype=torch.uint8)
    whole = int(checksum(data, "x"))
    assert int(checksum(data.clone(), "x")) == whole
    assert int(checksum(data, "y")) != whole
    assert int(checksum(data.view(1, -1), "x")) != whole
    for at in (0, 7, 1 << 19, (1 << 20) - 1, (1 << 20) + 9, len(data) - 1):
        changed = data.clone()
        changed[at] ^= 0x80
        assert int(checksum(changed, "x")) != whole, at
    words = data[: 1 << 20].view(-1, 8)
    for one, other in ((0, 1), (5, 100_000), (0, 1 << 16)):
        changed = data.clone()
        moved = changed[: 1 << 20].view(-1, 8)
        moved[one], moved[other] = words[other], words[one]
        assert int(checksum(changed, "x")) != whole
    with pytest.raises(ValueError, match="contiguous"):
        checksum(data[::2], "x")
