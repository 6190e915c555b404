"""Copies between KV pages and contiguous staging slots, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from antiphon.engine.kv_cache import PagedKvCache
from antiphon.kernels import page_copy
from antiphon.protocol.kv_messages import MemoryRegion

_WORD = torch.int64
"""torch's copies move words of 8 bytes, whatever the keys and values are."""


class PageBlock(Protocol):
    """Some layers and heads of some pages of one group."""

    @property
    def group(self) -> str: ...
    @property
    def pages(self) -> tuple[int, ...]: ...
    @property
    def layers(self) -> range: ...
    @property
    def heads(self) -> range: ...


class KvStaging:
    """Slots of one rank beside its pages; implements ``kv_transfer.staging.StagingMemory``.

    On a GPU copies wait for no other stream: whoever asks for one has seen that what it reads is there, and
    that nothing issued before still touches what it writes.

    Args:
        slots, slot_bytes: how many of which size; a multiple of 16.

    Raises:
        KernelLibraryError: on an H200, the copies' kernels were not built.
    """

    def __init__(self, kv_cache: PagedKvCache, slots: int, slot_bytes: int) -> None:
        self._kv_cache = kv_cache
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._memory = torch.zeros(slots * slot_bytes, dtype=torch.uint8, device=kv_cache.device)
        self._stream: torch.cuda.Stream | None = None
        self._by_kernel = page_copy.serves(kv_cache.device)
        if self._by_kernel:
            page_copy.load()

    @property
    def region(self) -> MemoryRegion:
        """All slots."""
        cuda = self._kv_cache.device.type == "cuda"
        return MemoryRegion(
            group="staging",
            address=self._memory.data_ptr(),
            pages=self._slots,
            page_bytes=self._slot_bytes,
            memory="VRAM" if cuda else "DRAM",
            device=(self._kv_cache.device.index or 0) if cuda else 0,
        )

    def gather(self, offset: int, blocks: Sequence[PageBlock]) -> Callable[[], bool]:
        """Pages into the memory from ``offset`` on; what it returns says when that is done."""
        return self._issue(offset, blocks, gather=True)

    def scatter(self, offset: int, blocks: Sequence[PageBlock]) -> Callable[[], bool]:
        """The memory from ``offset`` on into pages."""
        return self._issue(offset, blocks, gather=False)

    @torch.inference_mode()
    def _issue(self, offset: int, blocks: Sequence[PageBlock], *, gather: bool) -> Callable[[], bool]:
        device = self._kv_cache.device
        if device.type != "cuda":
            self._copy(offset, blocks, gather)
            return _done
        with torch.cuda.device(device):
            if self._stream is None:
                # Ahead of the engine's steps: a copy is short, and a peer waits for it.
                self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            if self._by_kernel:
                self._launch(offset, blocks, gather, self._stream.cuda_stream)
            else:
                with torch.cuda.stream(self._stream):
                    self._copy(offset, blocks, gather)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event.query

    def _launch(self, offset: int, blocks: Sequence[PageBlock], gather: bool, stream: int) -> None:
        """One kernel a block, nothing copied to the device and nothing allocated."""
        for block in blocks:
            chosen = self._chosen(block)
            size = len(block.pages) * chosen[0].numel()
            staged = self._memory[offset : offset + size]
            page_copy.copy_pages(chosen, block.pages, staged, stream, gather=gather)
            offset += size

    def _chosen(self, block: PageBlock) -> Tensor:
        """[N, layers, heads, bytes] uint8 view of all pages."""
        pages = self._kv_cache.memory(block.group)  # [N, layers, G, ..]
        layers, heads = block.layers, block.heads
        chosen = pages.flatten(3)[:, layers.start : layers.stop, heads.start : heads.stop]
        return chosen.view(torch.uint8)

    def _copy(self, offset: int, blocks: Sequence[PageBlock], gather: bool) -> None:
        for block in blocks:
            chosen = self._chosen(block).view(_WORD)
            index = self._index(block.pages)
            shape = (len(block.pages), *chosen.shape[1:])
            size = torch.Size(shape).numel() * _WORD.itemsize
            staged = self._memory[offset : offset + size].view(_WORD).view(shape)
            if gather:
                torch.index_select(chosen, 0, index, out=staged)
            else:
                chosen.index_copy_(0, index, staged)
            offset += size

    def _index(self, pages: tuple[int, ...]) -> Tensor:
        index = torch.tensor(pages, dtype=torch.int64)
        if self._kv_cache.device.type == "cuda":
            index = index.pin_memory()  # torch keeps such memory until its copy is over
        return index.to(self._kv_cache.device, non_blocking=True)


def make_staging(kv_cache: PagedKvCache, slots: int, slot_mib: int) -> KvStaging | None:
    """``slots`` slots beside these pages; None for none."""
    return KvStaging(kv_cache, slots, slot_mib * 2**20) if slots else None


def _done() -> bool:
    return True
