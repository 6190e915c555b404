"""The memory of one step's inputs and results: on the device once, on the host in two sets that take turns.

While the device may still read the set of the step in flight, the next step is written into the other one.
What every step has lies in one buffer, so that one copy brings it: each copy stands in the way of the step.
What the forward pass reads comes first in it, so that it can be sent while the rest is not written yet.
Other copies move runs from the beginning of a buffer: a strided one would go through a temporary in ordinary
memory, and wait.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from antiphon.engine.device_runtime import Completion, DeviceRuntime

TOKEN, SOURCE, POSITION, FULL_SLOT, SLIDING_SLOT = range(5)
"""Rows of ``HostMemory.vectors``."""
INVERSE_TEMPERATURE, MIN_P, TOP_K, TOP_P, UNIFORM = range(5)
"""Rows of ``HostMemory.parameters``."""
RESULT_COLUMNS = 64
"""Columns for which there is room without asking for more."""


class _Inputs:
    """Views of one buffer of eight-byte words that holds what a step's host writes.

    Attributes:
        vectors: [5, B] int64. lengths: [B] int32. order: [B] int64, rows by the way they are sampled.
        parameters: [5, B] float64.
        for_forward: the words of vectors and lengths. for_choice: the others.
    """

    def __init__(self, words: Tensor, rows: int) -> None:
        self.words = words
        self.vectors: Tensor = words[: 5 * rows].view(5, rows)
        end = 5 * rows + (rows + 1) // 2
        self.lengths: Tensor = words[5 * rows : end].view(torch.int32)[:rows]
        self.for_forward, self.for_choice = words[:end], words[end:]
        self.order: Tensor = self.for_choice[:rows]
        self.parameters: Tensor = self.for_choice[rows:].view(torch.float64).view(5, rows)

    @staticmethod
    def size(rows: int) -> int:
        """Words of a buffer."""
        return 11 * rows + (rows + 1) // 2


class HostMemory(_Inputs):
    """What the host writes for one step, and where its results arrive; numpy views of host memory.

    Attributes:
        updates: flat int64, places in the block tables, then the pages to put there as 32-bit numbers.
        chunk: flat int64, what a replayed chunk of a prompt reads; see ``chunk_graphs``.
        results: flat float64.
    """

    def __init__(
        self, runtime: DeviceRuntime, max_batch_size: int, table_entries: int, chunk_words: int
    ) -> None:
        words = runtime.host_memory(self.size(max_batch_size), dtype=torch.int64)
        super().__init__(words, max_batch_size)
        self.updates = runtime.host_memory(2 * table_entries, dtype=torch.int64)
        self.chunk = runtime.host_memory(chunk_words, dtype=torch.int64)
        self.results = runtime.host_memory(max_batch_size * RESULT_COLUMNS, dtype=torch.float64)
        self.in_use: Completion | None = None
        """Set while the device may read or write this."""


class StepMemory:
    """Owns the fixed device memory of steps, and the two sets of host memory."""

    def __init__(
        self, runtime: DeviceRuntime, max_batch_size: int, table_entries: int, chunk_words: int = 0
    ) -> None:
        device = runtime.device
        self.runtime = runtime
        self.max_batch_size = max_batch_size
        # One row more than on the host: the tokens that the last step sampled, read by SOURCE.
        words = torch.zeros(max_batch_size + _Inputs.size(max_batch_size), dtype=torch.int64, device=device)
        self._inputs = _Inputs(words[max_batch_size:], max_batch_size)
        self._inputs.vectors[FULL_SLOT:] = -1
        self.lengths, self.order = self._inputs.lengths, self._inputs.order
        self.parameters = self._inputs.parameters
        self._pool = words[: 2 * max_batch_size]
        self._sets = tuple(HostMemory(runtime, max_batch_size, table_entries, chunk_words) for _ in range(2))
        self._next = 0

    def take(self) -> HostMemory:
        """The host memory of the next step.

        Raises:
            RuntimeError: two steps are in flight already.
        """
        chosen = self._sets[self._next]
        if chosen.in_use is not None:
            raise RuntimeError("a third step was launched before the first was waited for")
        self._next = 1 - self._next
        return chosen

    @property
    def step_in_flight(self) -> bool:
        """Whether a step was launched and not waited for."""
        return any(each.in_use is not None for each in self._sets)

    @property
    def sampled(self) -> Tensor:
        """[B] int64: the tokens that the last step sampled, by row."""
        return self._pool[: self.max_batch_size]

    @property
    def token_pool(self) -> Tensor:
        """[2 * B] int64: sampled tokens, then those that the host wrote; what SOURCE indexes."""
        return self._pool

    def row(self, which: int) -> Tensor:
        """[B] int64: one of the host's vectors, on the device."""
        return self._inputs.vectors[which]

    def send_inputs(self, host: HostMemory) -> None:
        """Issue the copy of what the host wrote."""
        self._inputs.words.copy_(host.words, non_blocking=True)

    def send_for_forward(self, host: HostMemory) -> None:
        """Issue the copy of what a forward pass reads of it."""
        self._inputs.for_forward.copy_(host.for_forward, non_blocking=True)

    def send_for_choice(self, host: HostMemory) -> None:
        """Issue the copy of what a choice of tokens reads of it."""
        self._inputs.for_choice.copy_(host.for_choice, non_blocking=True)

    def send(self, array: np.ndarray) -> Tensor:
        """Issue the copy of an array of this step's own; for what only some steps have."""
        source = torch.from_numpy(array)
        if self.runtime.device.type == "cuda":
            source = source.pin_memory()  # torch keeps such memory until its copy is over
        return source.to(self.runtime.device, non_blocking=True)
