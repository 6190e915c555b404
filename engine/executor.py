"""Runs planned steps on the model and samples: the seam behind the planning, and its plain form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from antiphon.engine.batch import Work, build_forward_batch
from antiphon.engine.grammar import OutputGrammar, step_masks
from antiphon.engine.kv_cache import PagedKvCache
from antiphon.engine.sampler import Choice, SamplingRow, sample
from antiphon.model.forward import LanguageModel
from antiphon.protocol.messages import SamplingParams


class LaunchedStep(Protocol):
    """A step on its way."""

    def go_on(self) -> None:
        """The step before this one is committed: do what had to wait for its tokens. Called once, before
        ``result`` and before the next step is launched."""

    def result(self) -> list[Choice]:
        """Wait until the step has retired: no page that it references is read or written any more.

        Returns:
            One choice for each work item with ``samples``, in the order of the work.
        """


class Executor(Protocol):
    """Computes steps one after the other, in the order in which they were launched."""

    def launch(
        self, work: Sequence[Work], on_layer_group: Callable[[int], None] | None = None
    ) -> LaunchedStep:
        """Begin a step: its KV, and the choice of its tokens.

        Args:
            work: items with ``count >= 1``. An item whose only token is not known yet takes the one that the
                step launched just before samples for the same sequence.
            on_layer_group: called with 0, 1, .. right after a group's last layer was issued.
        """

    @property
    def road(self) -> str:
        """How steps are computed, in words for the log."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A step that was over when it was launched."""

    choices: list[Choice]

    def go_on(self) -> None:
        """Nothing waits."""

    def result(self) -> list[Choice]:
        """The choices."""
        return self.choices


def layer_hook(
    kv_cache: PagedKvCache, layer_groups: int
) -> Callable[[Callable[[int], None]], Callable[[int], None]]:
    """Turns a callback per layer group into one per layer."""
    group_after_layer = {layer: group for group, layer in enumerate(kv_cache.last_layers(layer_groups))}

    def hook(on_layer_group: Callable[[int], None]) -> Callable[[int], None]:
        def after_layer(layer: int) -> None:
            group = group_after_layer.get(layer)
            if group is not None:
                on_layer_group(group)

        return after_layer

    return hook


class StepExecutor:
    """The plain form: a step is computed whole before ``launch`` returns, and sampled with the host's help.

    Owns nothing but references: the model, the KV memory and the order of layer groups.
    """

    road = "eager forward pass, sampled on the host"

    def __init__(self, model: LanguageModel, kv_cache: PagedKvCache, layer_groups: int) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._layer_hook = layer_hook(kv_cache, layer_groups)

    @torch.inference_mode()
    def launch(
        self, work: Sequence[Work], on_layer_group: Callable[[int], None] | None = None
    ) -> LaunchedStep:
        """See ``Executor``. Every token of every item must be known."""
        if not work:
            return Finished([])
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
            sampled = [work[index] for index in sampling]
            masks = step_masks(list(grammars(enumerate(sampled))))
            choices = sample(logits, [sampling_row(item) for item in sampled], masks)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return Finished(choices)


def grammars(rows: Iterable[tuple[int, Work]]) -> Iterator[tuple[int, OutputGrammar]]:
    """The rows whose output has a grammar, with it."""
    for row, item in rows:
        if item.sequence.grammar is not None:
            yield row, item.sequence.grammar


def sampling_row(work: Work) -> SamplingRow:
    """What the plain sampler needs to know of a work item that samples."""
    sequence = work.sequence
    return SamplingRow(sampling_params(work), sequence.output)


def sampling_params(work: Work) -> SamplingParams:
    """The parameters of a work item that samples.

    Raises:
        TypeError: its request has none.
    """
    params = work.sequence.request.sampling
    if not isinstance(params, SamplingParams):
        raise TypeError(f"request {work.sequence.request.request_id} is sampled without sampling parameters")
    return params
