"""Runs one planned step on the model and samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from antiphon.engine.batch import Work, build_forward_batch
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.sampler import Choice, SamplingRow, sample
from antiphon.model.forward import LanguageModel
from antiphon.protocol.messages import SamplingParams


class StepExecutor:
    """Owns nothing but references: the model, the KV memory and the order of layer groups."""

    def __init__(self, model: LanguageModel, kv_cache: PagedKvCache, layer_groups: int) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._group_after_layer = {
            layer: group for group, layer in enumerate(kv_cache.last_layers(layer_groups))
        }

    @torch.inference_mode()
    def execute(self, work: Sequence[Work], on_layer_group: Callable[[int], None] | None) -> list[Choice]:
        """Compute the step's KV and choose tokens.

        Args:
            work: items with ``count >= 1``.
            on_layer_group: called with 0, 1, .. right after a group's last layer was issued.

        Returns:
            One choice for each item with ``samples``, in order. The step has retired on the device, so no
            page that it references is read or written any more.
        """
        if not work:
            return []
        device = self._kv_cache.device
        batch = build_forward_batch(work, self._kv_cache.page_size, device)
        after_layer = None if on_layer_group is None else self._layer_hook(on_layer_group)
        hidden = self._model.forward(batch, self._kv_cache, after_layer)
        sampling = [index for index, item in enumerate(work) if item.samples]
        choices: list[Choice] = []
        if sampling:
            last = batch.full.query_start[1:].long() - 1
            rows = last[torch.tensor(sampling, device=device)]
            logits = self._model.logits(hidden[rows])
            choices = sample(logits, [_sampling_row(work[index]) for index in sampling])
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return choices

    def _layer_hook(self, on_layer_group: Callable[[int], None]) -> Callable[[int], None]:
        def after_layer(layer: int) -> None:
            group = self._group_after_layer.get(layer)
            if group is not None:
                on_layer_group(group)

        return after_layer


def _sampling_row(work: Work) -> SamplingRow:
    sequence = work.sequence
    params = sequence.request.sampling
    if not isinstance(params, SamplingParams):
        raise TypeError(f"request {sequence.request.request_id} is sampled without sampling parameters")
    return SamplingRow(params, sequence.output)
