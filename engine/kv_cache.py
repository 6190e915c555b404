"""The memory of the paged KV cache: one tensor per group, page after page.

A group's tensor is [page, layer of the group, kv head, K|V, token, dim], contiguous; where full layers hold
FP8, what follows the kv head there are the bytes that ``kernels.fp8_pages`` describes. So a page is one run
of ``page_bytes`` bytes, the layers ``a : b`` of a page are one run within it, and so is a range of heads of
one layer. Each group has one page more than the pool hands out: the probe page, which belongs to no sequence
and which a peer may overwrite at any time to test its way in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.fp8_pages import PAGE_MULTIPLE, Fp8Pages, KvLayer, head_bytes
from antiphon.model.config import GptOssConfig
from antiphon.protocol.errors import ConfigError
from antiphon.protocol.identity import FP8_E4M3, PROTOCOL_VERSION, KvFingerprint
from antiphon.protocol.kv_messages import MemoryRegion
from antiphon.protocol.layer_groups import layer_range

LAYOUT = "page,layer,head,kv,token,dim"
"""The order of dimensions, as the fingerprint states it; the last varies fastest."""


class PagedKvCache:
    """Owns the KV tensors of one rank.

    Args:
        model: gives layers, kv heads and head dim.
        full_pages, sliding_pages: pages that the pools hand out; one probe page each is added.
        page_size: positions per page (S).
        dtype, device: of the keys and values.
        kv_heads: heads of this rank (G); all of the model's when absent.
        full_fp8: pages of full layers hold e4m3 numbers with a scale per token and head, whatever ``dtype``.

    Raises:
        ConfigError: a page size of which FP8 pages cannot be made.
    """

    def __init__(
        self,
        model: GptOssConfig,
        *,
        full_pages: int,
        sliding_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        kv_heads: int | None = None,
        full_fp8: bool = False,
    ) -> None:
        if full_fp8 and page_size % PAGE_MULTIPLE:
            raise ConfigError(f"FP8 pages of {page_size} positions: not a multiple of {PAGE_MULTIPLE}")
        self.model = model
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.kv_heads = model.num_key_value_heads if kv_heads is None else kv_heads
        self.full_fp8 = full_fp8
        self._layers = {"full": model.full_layers, "sliding": model.sliding_layers}
        self._pages = {"full": full_pages, "sliding": sliding_pages}
        # Zeros, because a kernel may load a whole page of which only a part was ever written, and a NaN there
        # would survive a multiplication by a weight of zero.
        self._memory = {group: self._zeros(group) for group in self._layers}
        self._views: dict[int, KvLayer] = {}
        for group, layers in self._layers.items():
            for index, layer in enumerate(layers):
                view = self._memory[group][:, index]
                fp8 = self._is_fp8(group)
                self._views[layer] = Fp8Pages(view, page_size, model.head_dim) if fp8 else view

    def _is_fp8(self, group: str) -> bool:
        return self.full_fp8 and group == "full"

    def _zeros(self, group: str) -> Tensor:
        pages = (self._pages[group] + 1, len(self._layers[group]), self.kv_heads)
        if self._is_fp8(group):
            size = head_bytes(self.page_size, self.model.head_dim)
            return torch.zeros((*pages, size), dtype=torch.uint8, device=self.device)
        shape = (*pages, 2, self.page_size, self.model.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def layer(self, index: int) -> KvLayer:
        """Pages of model layer ``index``: [N, G, 2, S, D], keys at 0, values at 1, a strided view; or FP8."""
        return self._views[index]

    def numbers(self, index: int) -> Tensor:
        """[N, G, 2, S, D] float32, a copy of what the pages of model layer ``index`` hold."""
        view = self._views[index]
        if isinstance(view, Fp8Pages):
            return view.widened(torch.arange(view.shape[0], device=self.device))
        return view.float()

    def memory(self, group: str) -> Tensor:
        """The whole group, probe page included: [N, layers, G, 2, S, D], in FP8 [N, layers, G, bytes]."""
        return self._memory[group]

    def randomise(self) -> None:
        """Fill every page with keys and values of a normal distribution, for measurements."""
        for group, memory in self._memory.items():
            for first in range(0, memory.shape[0], 256):
                part = memory[first : first + 256]
                if not self._is_fp8(group):
                    part.normal_()
                    continue
                numbers = 2 * self.page_size * self.model.head_dim
                bits = torch.randn((*part.shape[:3], numbers), device=self.device) * 100.0
                part[..., :numbers] = bits.clamp_(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
                part[..., numbers:].view(torch.bfloat16).fill_(0.01)

    def probe_page(self, group: str) -> int:
        """The page of a group that no sequence ever holds."""
        return self._pages[group]

    def page_bytes(self, group: str) -> int:
        """Bytes of one page, all layers of the group."""
        memory = self._memory[group]
        return memory[0].numel() * memory.element_size()

    def read_page(self, group: str, page: int) -> bytes:
        """A copy of one page's bytes."""
        return self._memory[group][page].reshape(-1).view(torch.uint8).cpu().numpy().tobytes()

    def write_page(self, group: str, page: int, data: bytes) -> None:
        """Overwrite one page; on return the device has done so."""
        target = self._memory[group][page].view(-1).view(torch.uint8)
        target.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def memory_regions(self) -> tuple[MemoryRegion, ...]:
        """What a transport registers: one contiguous region per group."""
        cuda = self.device.type == "cuda"
        return tuple(
            MemoryRegion(
                group=group,
                address=memory.data_ptr(),
                pages=memory.shape[0],
                page_bytes=self.page_bytes(group),
                memory="VRAM" if cuda else "DRAM",
                device=(self.device.index or 0) if cuda else 0,
            )
            for group, memory in self._memory.items()
        )

    def fingerprint(self, model_name: str, revision: str) -> KvFingerprint:
        """What a peer must share before its bytes may land here."""
        dtype = str(self.dtype).removeprefix("torch.")
        return KvFingerprint(
            protocol_version=PROTOCOL_VERSION,
            model=model_name,
            revision=revision,
            kv_dtype=dtype,
            page_size_tokens=self.page_size,
            full_layers=len(self.model.full_layers),
            sliding_layers=len(self.model.sliding_layers),
            kv_heads=self.model.num_key_value_heads,
            head_dim=self.model.head_dim,
            window_tokens=self.model.sliding_window,
            layout=LAYOUT,
            full_kv_dtype=FP8_E4M3 if self.full_fp8 else dtype,
        )

    def last_layers(self, layer_groups: int) -> tuple[int, ...]:
        """The model layer after which each layer group is complete, ascending.

        Raises:
            ConfigError: there are more layer groups than layers of a page group.
        """
        fewest = min(len(layers) for layers in self._layers.values())
        if not 1 <= layer_groups <= fewest:
            raise ConfigError(f"transfer.layer_groups {layer_groups} is not within 1 .. {fewest}")
        return tuple(
            max(layers[layer_range(len(layers), part, layer_groups)[-1]] for layers in self._layers.values())
            for part in range(layer_groups)
        )
