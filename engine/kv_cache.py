"""The memory of the paged KV cache: one tensor per group, page after page.

A group's tensor is [page, layer of the group, kv head, K|V, token, dim], contiguous. So a page is one run of
``page_bytes`` bytes, the layers ``a : b`` of a page are one run within it, and so is a range of heads of one
layer. Each group has one page more than the pool hands out: the probe page, which belongs to no sequence and
which a peer may overwrite at any time to test its way in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.model.config import GptOssConfig
from antiphon.protocol.errors import ConfigError
from antiphon.protocol.identity import PROTOCOL_VERSION, KvFingerprint
from antiphon.protocol.kv_messages import MemoryRegion

LAYOUT = "page,layer,head,kv,token,dim"
"""The order of dimensions, as the fingerprint states it; the last varies fastest."""


def layer_group_bounds(layers: int, groups: int) -> tuple[tuple[int, int], ...]:
    """Which layers of a page group belong to each layer group: ``[begin, end)`` indices within the group."""
    return tuple((g * layers // groups, (g + 1) * layers // groups) for g in range(groups))


class PagedKvCache:
    """Owns the KV tensors of one rank.

    Args:
        model: gives layers, kv heads and head dim.
        full_pages, sliding_pages: pages that the pools hand out; one probe page each is added.
        page_size: positions per page (S).
        dtype, device: of the keys and values.
        kv_heads: heads of this rank (G); all of the model's when absent.
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
    ) -> None:
        self.model = model
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.kv_heads = model.num_key_value_heads if kv_heads is None else kv_heads
        self._layers = {"full": model.full_layers, "sliding": model.sliding_layers}
        self._pages = {"full": full_pages, "sliding": sliding_pages}
        # Zeros, because a kernel may load a whole page of which only a part was ever written, and a NaN there
        # would survive a multiplication by a weight of zero.
        self._memory = {
            group: torch.zeros(
                (self._pages[group] + 1, len(layers), self.kv_heads, 2, page_size, model.head_dim),
                dtype=dtype,
                device=self.device,
            )
            for group, layers in self._layers.items()
        }
        self._views: dict[int, Tensor] = {}
        for group, layers in self._layers.items():
            for index, layer in enumerate(layers):
                self._views[layer] = self._memory[group][:, index]

    def layer(self, index: int) -> Tensor:
        """[N, G, 2, S, D] pages of model layer ``index``, keys at 0, values at 1; a strided view."""
        return self._views[index]

    def memory(self, group: str) -> Tensor:
        """[N, layers, G, 2, S, D] the whole group, probe page included."""
        return self._memory[group]

    def probe_page(self, group: str) -> int:
        """The page of a group that no sequence ever holds."""
        return self._pages[group]

    def page_bytes(self, group: str) -> int:
        """Bytes of one page, all layers of the group."""
        memory = self._memory[group]
        return memory[0].numel() * memory.element_size()

    def layer_bytes(self) -> int:
        """Bytes of one layer within a page."""
        return self.kv_heads * 2 * self.page_size * self.model.head_dim * self.dtype.itemsize

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
        return KvFingerprint(
            protocol_version=PROTOCOL_VERSION,
            model=model_name,
            revision=revision,
            kv_dtype=str(self.dtype).removeprefix("torch."),
            page_size_tokens=self.page_size,
            full_layers=len(self.model.full_layers),
            sliding_layers=len(self.model.sliding_layers),
            kv_heads=self.model.num_key_value_heads,
            head_dim=self.model.head_dim,
            window_tokens=self.model.sliding_window,
            layout=LAYOUT,
        )

    def last_layers(self, layer_groups: int) -> tuple[int, ...]:
        """The model layer after which each layer group is complete, ascending.

        Raises:
            ConfigError: there are more layer groups than layers of a page group.
        """
        fewest = min(len(layers) for layers in self._layers.values())
        if not 1 <= layer_groups <= fewest:
            raise ConfigError(f"transfer.layer_groups {layer_groups} is not within 1 .. {fewest}")
        bounds = {g: layer_group_bounds(len(layers), layer_groups) for g, layers in self._layers.items()}
        return tuple(
            max(self._layers[group][bounds[group][g][1] - 1] for group in self._layers)
            for g in range(layer_groups)
        )
