"""A rank's experts in the form of the Hopper kernels: from the cache, or converted and then cached.

Whatever is wrong with the cache (damaged, stale, full, not writable) is said in the log and costs time, never
correctness: the checkpoint is what counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from antiphon.kernels.reference import ExpertMatrix
from antiphon.model.checkpoint.index import CheckpointIndex
from antiphon.model.checkpoint.read import ParameterReader
from antiphon.model.converted_experts import ConvertedExperts
from antiphon.model.parallel.layout import ParallelLayout
from antiphon.model.parallel.sharding import assemble
from antiphon.model.weight_cache import expert_parts as parts
from antiphon.model.weight_cache.expert_share import ExpertShare
from antiphon.model.weight_cache.fingerprint import expert_fingerprint
from antiphon.model.weight_cache.store import NoRoomError, WeightCache
from antiphon.model.weight_cache.weight_file import (
    FORMAT_VERSION,
    DamagedCacheError,
    TensorForm,
    WeightFileWriter,
    read_weight_file,
    size_of,
)

_log = logging.getLogger(__name__)

_LEAVES = (
    *("mlp1_weight.blocks", "mlp1_weight.scales", "mlp1_bias"),
    *("mlp2_weight.blocks", "mlp2_weight.scales", "mlp2_bias"),
)


class Origin(StrEnum):
    """Where a rank's experts came from."""

    CACHE = "cache"
    CONVERTED = "converted"
    """From the checkpoint, and nothing was written."""
    CONVERTED_AND_CACHED = "converted and cached"


@dataclass(frozen=True, slots=True)
class LoadedExperts:
    """All layers' experts of one rank."""

    layers: list[ConvertedExperts]
    origin: Origin


@dataclass(frozen=True, slots=True)
class _Part:
    """One file of the cache, and how its tensors are found in a layer."""

    path: Path
    forms: list[TensorForm]
    tensors: Callable[[ConvertedExperts], list[Tensor]]


def load_experts(
    index: CheckpointIndex,
    held: range | ParallelLayout,
    device: torch.device,
    *,
    resident_fp8: bool,
    cache: WeightCache | None,
) -> LoadedExperts:
    """Every layer's experts on a device, as far as they are held there.

    Args:
        held: ids of experts that are held whole; or the layout of a rank, which holds some of them whole or
            columns of each.
        resident_fp8: their FP8 tiles too, which only whole ones have.
        cache: None converts, and keeps nothing.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigError: the model cannot be spread this way.
        ValueError: its shapes are not those that the Hopper kernels are made for.
    """
    begin = time.perf_counter()
    share = ExpertShare.of(index.config, held)
    loaded = _load(index, share, device, resident_fp8 and share.layout is None, cache)
    _log.info("%s: %s in %.1f s", share, loaded.origin, time.perf_counter() - begin)
    return loaded


def _load(
    index: CheckpointIndex,
    share: ExpertShare,
    device: torch.device,
    resident_fp8: bool,
    cache: WeightCache | None,
) -> LoadedExperts:
    if cache is None:
        return LoadedExperts(list(_convert(index, share, device, resident_fp8)), Origin.CONVERTED)
    files = _parts(index, share, resident_fp8, cache)
    if all(part.path.exists() for part in files):
        found = _read(files, index.config.num_hidden_layers, device, cache)
        if found is not None:
            return LoadedExperts(found, Origin.CACHE)
    writing = _Writing(files, cache, device)
    layers = []
    with writing:
        for layer in _convert(index, share, device, resident_fp8):
            layers.append(layer)
            writing.add(layer)
    return LoadedExperts(layers, Origin.CONVERTED_AND_CACHED if writing.complete else Origin.CONVERTED)


def _parts(index: CheckpointIndex, share: ExpertShare, resident_fp8: bool, cache: WeightCache) -> list[_Part]:
    layers, count = index.config.num_hidden_layers, len(share.experts)
    name = f"{expert_fingerprint(index)}-v{FORMAT_VERSION}-{share.name}"
    streamed = parts.streamed_forms(layers, count, share.columns_held, share.part)
    found = [_Part(cache.path(f"{name}-streamed"), streamed, parts.streamed_tensors)]
    if resident_fp8:
        found.append(_Part(cache.path(f"{name}-fp8"), parts.fp8_forms(layers, count), parts.fp8_tensors))
    return found


def _read(
    files: list[_Part], layers: int, device: torch.device, cache: WeightCache
) -> list[ConvertedExperts] | None:
    """All layers from the cache; None when a file was damaged, which is deleted then."""
    path = files[0].path
    try:
        for part in files:
            cache.used(part.path)
        with closing(read_weight_file(path, files[0].forms, device)) as tensors:
            streamed = list(parts.streamed_layers(tensors, layers))
        if len(files) == 1:
            return [ConvertedExperts(experts, exponents, None) for experts, exponents in streamed]
        path = files[1].path
        with closing(read_weight_file(path, files[1].forms, device)) as tensors:
            tiles = list(parts.fp8_layers(tensors, streamed))
        return [
            ConvertedExperts(experts, exponents, fp8)
            for (experts, exponents), fp8 in zip(streamed, tiles, strict=True)
        ]
    except DamagedCacheError as error:
        _log.warning("converted weights are damaged and made again from the checkpoint: %s", error)
    except OSError as error:  # deleted a moment ago, or not readable
        _log.warning("converted weights cannot be read; the checkpoint is converted: %s", error)
        return None
    try:
        cache.discard(path)
    except OSError as error:
        _log.warning("a damaged file of converted weights cannot be deleted: %s", error)
    return None


def _convert(
    index: CheckpointIndex, share: ExpertShare, device: torch.device, resident_fp8: bool
) -> Iterator[ConvertedExperts]:
    """Layer by layer, from the checkpoint."""
    parameters = {parameter.name: parameter for parameter in index.parameters}
    cut_of = share.cuts(index.config)
    with ParameterReader(index, device) as reader:

        def held(name: str) -> Tensor:
            parameter = parameters[name]
            cut, read = cut_of(name, parameter.shape), partial(reader.read, parameter)
            # A bias that another rank adds is read from nowhere, and its zeros are made on the CPU.
            return assemble(cut, parameter.shape, reader.dtype(parameter), read).to(device)

        for layer in range(index.config.num_hidden_layers):
            read = [held(f"block.{layer}.mlp.{leaf}") for leaf in _LEAVES]
            yield ConvertedExperts.from_checkpoint(
                *(ExpertMatrix(read[0], read[1]), read[2], ExpertMatrix(read[3], read[4]), read[5]),
                resident_fp8=resident_fp8,
            )


class _Writing:
    """Files of a cache, written on a thread of their own while further layers are converted.

    A problem ends the writing with a line in the log; what was written by then is deleted.
    """

    def __init__(self, files: list[_Part], cache: WeightCache, device: torch.device) -> None:
        self.complete = False
        self._cache = cache
        self._device = device
        self._writers: list[tuple[_Part, WeightFileWriter]] = []
        self._failed = not self._begin(files)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-cache")
        self._written: list[Future[None]] = []

    def __enter__(self) -> _Writing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._thread.shutdown(cancel_futures=kind is not None)
        try:
            if kind is None:
                for layer in self._written:
                    layer.result()  # raises what was no problem of the disk
                if not self._failed:
                    self._attempt(lambda writer, _: writer.commit())
                self.complete = bool(self._writers) and not self._failed
        finally:
            for _, writer in self._writers:
                writer.abort()

    def add(self, layer: ConvertedExperts) -> None:
        """Write one more layer, some time."""
        if not self._failed:
            self._written.append(self._thread.submit(self._write, layer))

    def _begin(self, files: list[_Part]) -> bool:
        absent = [part for part in files if not part.path.exists()]
        keep = {part.path for part in files}
        try:
            deleted = self._cache.make_room(sum(size_of(part.forms) for part in absent), keep)
            for file in deleted:
                _log.info("deleted %s, used longest ago, for newer converted weights", file.path)
            for part in absent:
                self._writers.append((part, WeightFileWriter(part.path, part.forms, self._device)))
        except BlockingIOError as error:
            _log.info("converted weights are not written: another process does so (%s)", error)
            return False
        except (NoRoomError, OSError) as error:
            _log.warning("converted weights are not written: %s", error)
            return False
        return True

    def _write(self, layer: ConvertedExperts) -> None:
        def write(writer: WeightFileWriter, part: _Part) -> None:
            for tensor in part.tensors(layer):
                writer.write(tensor)

        if not self._failed:
            self._attempt(write)

    def _attempt(self, step: Callable[[WeightFileWriter, _Part], None]) -> None:
        try:
            for part, writer in self._writers:
                step(writer, part)
        except OSError as error:
            self._failed = True
            _log.warning("converted weights are not kept: %s", error)
