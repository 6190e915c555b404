"""Converted experts on disk: the same weights again, and whatever may be wrong with a cache."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.kernels.moe.fp8_weights import convert_matrix
from antiphon.kernels.moe.mixed import RowExponents
from antiphon.kernels.moe.streamed import pack_matrix
from antiphon.kernels.reference import ExpertMatrix
from antiphon.model.checkpoint.index import CheckpointIndex, open_checkpoint
from antiphon.model.checkpoint.synthesize import synthesize_parameters
from antiphon.model.checkpoint.write import write_checkpoint
from antiphon.model.config import preset
from antiphon.model.converted_experts import ConvertedExperts
from antiphon.model.weight_cache import expert_parts, weight_file
from antiphon.model.weight_cache.fingerprint import expert_fingerprint
from antiphon.model.weight_cache.load_experts import LoadedExperts, Origin, load_experts
from antiphon.model.weight_cache.store import WeightCache

CPU = torch.device("cpu")
SHAPE = replace(
    preset("gpt-oss-20b"),
    num_hidden_layers=2,
    num_experts=2,
    vocab_size=64,
    num_attention_heads=8,
    num_key_value_heads=1,
    experts_per_token=1,
)
"""Experts of the published shape, as the Hopper kernels want them, and little else."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "two-experts"
    write_checkpoint(directory, SHAPE, synthesize_parameters(SHAPE, seed=3))
    return directory


@pytest.fixture(scope="module")
def index(checkpoint: Path) -> CheckpointIndex:
    return open_checkpoint(checkpoint)


@pytest.fixture(scope="module")
def converted(index: CheckpointIndex) -> list[ConvertedExperts]:
    return load(index, None).layers


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache", 10 << 30)


def load(index: CheckpointIndex, cache: WeightCache | None) -> LoadedExperts:
    return load_experts(index, range(SHAPE.num_experts), CPU, resident_fp8=False, cache=cache)


def assert_same(found: list[ConvertedExperts], wanted: list[ConvertedExperts]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        pairs = zip(expert_parts.streamed_tensors(one), expert_parts.streamed_tensors(other), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert one.inexact == other.inexact


def test_the_second_start_reads_what_the_first_one_made(
    index: CheckpointIndex, cache: WeightCache, converted: list[ConvertedExperts]
) -> None:
    first = load(index, cache)
    (file,) = cache.files()
    second = load(index, cache)
    assert (first.origin, second.origin) == (Origin.CONVERTED_AND_CACHED, Origin.CACHE)
    assert_same(first.layers, converted)
    assert_same(second.layers, converted)
    assert list(cache.directory.iterdir()) == [file.path]
    expected = weight_file.size_of(expert_parts.streamed_forms(SHAPE.num_hidden_layers, SHAPE.num_experts))
    assert file.size_bytes == expected


def test_ranks_keep_their_own_experts(index: CheckpointIndex, cache: WeightCache) -> None:
    halves = [
        load_experts(index, experts, CPU, resident_fp8=False, cache=cache).layers
        for experts in (range(1), range(1, 2))
    ]
    assert len(cache.files()) == 2
    again = load_experts(index, range(1, 2), CPU, resident_fp8=False, cache=cache)
    assert again.origin is Origin.CACHE
    assert_same(again.layers, halves[1])
    assert not torch.equal(halves[0][0].streamed.down, halves[1][0].streamed.down)


def test_fp8_tiles_come_back(tmp_path: Path, cache: WeightCache) -> None:
    small = replace(SHAPE, num_hidden_layers=1, num_experts=1)
    write_checkpoint(tmp_path / "one", small, synthesize_parameters(small, seed=4))
    index = open_checkpoint(tmp_path / "one")
    first, second = (load_experts(index, range(1), CPU, resident_fp8=True, cache=cache) for _ in range(2))
    assert (first.origin, second.origin) == (Origin.CONVERTED_AND_CACHED, Origin.CACHE)
    for one, other in zip(
        expert_parts.fp8_tensors(first.layers[0]), expert_parts.fp8_tensors(second.layers[0]), strict=True
    ):
        assert torch.equal(one, other)
    assert second.layers[0].inexact == first.layers[0].inexact
    # A pool without resident FP8 shares the other file.
    plain = load_experts(index, range(1), CPU, resident_fp8=False, cache=cache)
    assert (plain.origin, plain.layers[0].fp8) == (Origin.CACHE, None)
    assert len(cache.files()) == 2


def test_a_damaged_file_is_said_and_made_again(
    index: CheckpointIndex,
    cache: WeightCache,
    converted: list[ConvertedExperts],
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(index, cache)
    (file,) = cache.files()
    damaged = bytearray(file.path.read_bytes())
    damaged[len(damaged) // 2] ^= 0x10
    file.path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        again = load(index, cache)
    assert str(file.path) in caplog.text
    assert again.origin is Origin.CONVERTED_AND_CACHED
    assert_same(again.layers, converted)
    assert load(index, cache).origin is Origin.CACHE


def test_a_damaged_file_that_stays_is_not_said_to_be_made_again(
    tmp_path: Path, cache: WeightCache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(SHAPE, num_hidden_layers=1, num_experts=1)
    write_checkpoint(tmp_path / "one", small, synthesize_parameters(small, seed=8))
    index = open_checkpoint(tmp_path / "one")
    first = load_experts(index, range(1), CPU, resident_fp8=False, cache=cache)
    (file,) = cache.files()
    file.path.write_bytes(file.path.read_bytes()[:-1])

    def refuse(self: WeightCache, path: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(WeightCache, "discard", refuse)
    with caplog.at_level(logging.WARNING):
        again = load_experts(index, range(1), CPU, resident_fp8=False, cache=cache)
    assert "cannot be deleted" in caplog.text
    assert again.origin is Origin.CONVERTED
    assert_same(again.layers, first.layers)


def test_other_weights_under_the_same_name_are_not_mistaken(checkpoint: Path, tmp_path: Path) -> None:
    prints = {expert_fingerprint(open_checkpoint(checkpoint))}
    times = {path.name: path.stat() for path in checkpoint.iterdir()}
    for seed in (3, 5):  # the same weights again, and others, with the times of the first
        directory = tmp_path / str(seed)
        write_checkpoint(directory, SHAPE, synthesize_parameters(SHAPE, seed=seed))
        for path in directory.iterdir():
            os.utime(path, ns=(times[path.name].st_atime_ns, times[path.name].st_mtime_ns))
        prints.add(expert_fingerprint(open_checkpoint(directory)))
    assert len(prints) == 2
    os.utime(next(directory.glob("*.safetensors")))
    prints.add(expert_fingerprint(open_checkpoint(directory)))
    assert len(prints) == 3


def test_workers_that_start_together_leave_one_file(
    tmp_path: Path, cache: WeightCache, caplog: pytest.LogCaptureFixture
) -> None:
    small = replace(SHAPE, num_hidden_layers=1, num_experts=1)
    write_checkpoint(tmp_path / "one", small, synthesize_parameters(small, seed=7))
    index = open_checkpoint(tmp_path / "one")

    def start(_: int) -> LoadedExperts:
        return load_experts(index, range(1), CPU, resident_fp8=False, cache=cache)

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(3) as workers:
        first, *others = list(workers.map(start, range(3)))
    assert caplog.text == ""
    for other in others:
        assert_same(other.layers, first.layers)
    (file,) = cache.directory.iterdir()
    assert file.suffix == ".weights"
    assert start(0).origin is Origin.CACHE


def test_a_full_disk_keeps_nobody_from_starting(
    index: CheckpointIndex,
    cache: WeightCache,
    converted: list[ConvertedExperts],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = 0
    pwrite = os.pwrite

    def fills_up(file: int, data: Any, at: int) -> int:
        nonlocal written
        written += len(data)
        if written > 20 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, at)

    monkeypatch.setattr(os, "pwrite", fills_up)
    with caplog.at_level(logging.WARNING):
        found = load(index, cache)
    assert found.origin is Origin.CONVERTED
    assert_same(found.layers, converted)
    assert "No space left" in caplog.text
    assert list(cache.directory.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said(
    index: CheckpointIndex, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        found = load(index, WeightCache(tmp_path / "file" / "cache", 1 << 40))
    assert found.origin is Origin.CONVERTED
    assert "not written" in caplog.text


def test_a_folder_that_may_only_be_read_serves_reads(
    index: CheckpointIndex, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(index, cache)
    monkeypatch.setattr(os, "access", lambda *_: False)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "read-only")

    monkeypatch.setattr(os, "utime", refuse)
    assert load(index, cache).origin is Origin.CACHE


def test_the_limit_is_kept_to(
    index: CheckpointIndex, cache: WeightCache, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(index, replace(cache, limit_bytes=1 << 20)).origin is Origin.CONVERTED
    assert "exceed the limit" in caplog.text
    assert cache.files() == []


def test_other_bytes_out_of_a_conversion_need_a_new_format_version() -> None:
    """Whoever changes a conversion changes this digest, and FORMAT_VERSION with it."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int) -> ExpertMatrix:
        blocks = torch.randint(0, 256, (1, rows, 90, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(110, 130, (1, rows, 90), dtype=torch.uint8, generator=generator)
        return ExpertMatrix(blocks, scales)

    gate_up, down = matrix(128), matrix(64)
    exponents, fp8 = RowExponents.from_checkpoint(gate_up, down), convert_matrix(gate_up)
    made = [
        *(pack_matrix(gate_up, interleaved=True), pack_matrix(down, interleaved=False)),
        *(exponents.gate_up, exponents.down, fp8.values, fp8.scales),
        torch.tensor([exponents.inexact_blocks, fp8.inexact_tiles]),
    ]
    digest = hashlib.sha256()
    for tensor in made:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert (weight_file.FORMAT_VERSION, digest.hexdigest()[:16]) == (1, "a5c9590cc1da19fb")


def test_forms_are_those_of_the_tensors(converted: list[ConvertedExperts]) -> None:
    forms = expert_parts.streamed_forms(1, SHAPE.num_experts)
    held = expert_parts.streamed_tensors(converted[0])
    assert [(form.shape, form.dtype) for form in forms] == [(tuple(t.shape), t.dtype) for t in held]
