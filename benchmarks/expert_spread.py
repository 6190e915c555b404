"""How evenly a run's tokens were spread over the experts: what synthetic weights must show in a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from antiphon.benchmarks.floors import expected_experts
from antiphon.kernels import reference
from antiphon.model import chunk_router, cuda_experts
from antiphon.model.config import GptOssConfig
from antiphon.model.parallel import cuda_experts as rank_experts

_ROUTERS: tuple[tuple[ModuleType, str, Callable[[Any], Tensor]], ...] = (
    (reference, "route", lambda routing: routing[0]),
    *((module, "route", lambda routing: routing[0]) for module in (cuda_experts, rank_experts, chunk_router)),
    (chunk_router, "route_ranked", lambda routing: routing[0]),
    *(
        (module, "route_grouped", lambda routing: routing.expert_ids)
        for module in (cuda_experts, rank_experts)
    ),
)
"""Where the models look for their routers, and which part of the result are the experts."""


@contextmanager
def recorded_routing() -> Iterator[list[Tensor]]:
    """Collects the experts, [T, K] int64, of every layer that runs eagerly meanwhile, whatever its road.

    Padding is left out.
    """
    seen: list[Tensor] = []

    def recorded(route: Callable[..., Any], ids_of: Callable[[Any], Tensor]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            routing = route(*arguments, **more)
            ids = ids_of(routing)
            seen.append(ids[ids[:, 0] >= 0])
            return routing

        return call

    with ExitStack() as stack:
        for module, name, ids_of in _ROUTERS:
            wrapped = recorded(getattr(module, name), ids_of)
            stack.enter_context(mock.patch.object(module, name, wrapped))
        yield seen


def expert_spread(config: GptOssConfig, seen: Sequence[Tensor]) -> float:
    """Distinct experts per layer and step, over what uniform routing would touch; 1 is as even as chance."""
    distinct = sum(torch.bincount(ids.flatten()).count_nonzero().item() for ids in seen)
    return distinct / sum(expected_experts(config, len(ids)) for ids in seen)
