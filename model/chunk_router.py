"""The router of chunks on an H200: for few tokens with the ranking of its pairs, for many by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from antiphon.kernels.moe.chunk_route import FASTER_TOKENS, RouteScratch, route_ranked
from antiphon.kernels.moe.expert_range import TOP_K
from antiphon.kernels.moe.mixed import MixedWorkspace
from antiphon.kernels.moe.prefill import Fp8Workspace
from antiphon.kernels.router import route


class ChunkRouter:
    """Routes the steps that are multiplied in e4m3, on one stream; their number of tokens decides how.

    Args:
        experts: held on this device.
        most_ranked: steps of up to so many tokens, padding included, are routed and ranked in one launch.
        overlap: that launch may begin while the one ahead ends.
    """

    def __init__(
        self,
        experts: int,
        device: torch.device,
        *,
        most_ranked: int = FASTER_TOKENS,
        overlap: bool = False,
    ) -> None:
        self._most_ranked, self._overlap = most_ranked, overlap
        self._scratch = RouteScratch(most_ranked, experts, device)

    def ranks(self, tokens: int) -> bool:
        """Whether a step of so many tokens leaves the ranks of its pairs in the experts' buffers."""
        return tokens <= self._most_ranked

    def __call__(
        self,
        normed: Tensor,
        router: tuple[Tensor, Tensor],
        buffers: MixedWorkspace | Fp8Workspace,
        tile: int,
        live: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """[T, H] -> expert ids and weights [T, 4]; padding, from ``live`` on, is kept from the experts."""
        if self.ranks(normed.shape[0]):
            return route_ranked(*(normed, *router, buffers, self._scratch, tile, live), overlap=self._overlap)
        return route(normed, *router, TOP_K, live)
