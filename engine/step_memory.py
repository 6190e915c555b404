"""The memory of one step's inputs and results: on the device once, on the host in two sets that take turns.

While the device may still read the set of the step in flight, the next step is written into the other one.
Copies move whole buffers, or runs from their beginning: a strided copy would go through a temporary in
ordinary memory, and wait.
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


class HostMemory:
    """What the host writes for one step, and where its results arrive; numpy views of host memory.

    Attributes:
        vectors: [5, B] int64. lengths: [B] int32. order: [B] int64, rows by the way they are sampled.
        parameters: [5, B] float64. updates: flat int64, places in the block tables, then the pages to put
        there. results: flat float64.
    """

    def __init__(self, runtime: DeviceRuntime, max_batch_size: int, table_entries: int) -> None:
        self.vectors = runtime.host_memory(5, max_batch_size, dtype=torch.int64)
        self.lengths = runtime.host_memory(max_batch_size, dtype=torch.int32)
        self.order = runtime.host_memory(max_batch_size, dtype=torch.int64)
        self.parameters = runtime.host_memory(5, max_batch_size, dtype=torch.float64)
        self.updates = runtime.host_memory(2 * table_entries, dtype=torch.int64)
        self.results = runtime.host_memory(max_batch_size * RESULT_COLUMNS, dtype=torch.float64)
        self.in_use: Completion | None = None
        """Set while the device may read or write this."""


class StepMemory:
    """Owns the fixed device memory of steps, and the two sets of host memory."""

    def __init__(self, runtime: DeviceRuntime, max_batch_size: int, table_entries: int) -> None:
        device = runtime.device
        self.runtime = runtime
        self.max_batch_size = max_batch_size
        # One row more than on the host: the tokens that the last step sampled, read by SOURCE.
        self._vectors = torch.zeros(6, max_batch_size, dtype=torch.int64, device=device)
        self._vectors[1 + FULL_SLOT :] = -1
        self.lengths = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self.order = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self.parameters = torch.zeros(5, max_batch_size, dtype=torch.float64, device=device)
        self._sets = tuple(HostMemory(runtime, max_batch_size, table_entries) for _ in range(2))
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
    def sampled(self) -> Tensor:
        """[B] int64: the tokens that the last step sampled, by row."""
        return self._vectors[0]

    @property
    def token_pool(self) -> Tensor:
        """[2 * B] int64: sampled tokens, then those that the host wrote; what SOURCE indexes."""
        return self._vectors[:2].view(-1)

    def row(self, which: int) -> Tensor:
        """[B] int64: one of the host's vectors, on the device."""
        return self._vectors[1 + which]

    def send_vectors(self, host: HostMemory) -> None:
        """Issue the copies of vectors and lengths."""
        self._vectors[1:].copy_(host.vectors, non_blocking=True)
        self.lengths.copy_(host.lengths, non_blocking=True)

    def send_sampling(self, host: HostMemory) -> None:
        """Issue the copies of what the sampler reads."""
        self.parameters.copy_(host.parameters, non_blocking=True)
        self.order.copy_(host.order, non_blocking=True)

    def send(self, array: np.ndarray) -> Tensor:
        """Issue the copy of an array of this step's own; for what only some steps have."""
        source = torch.from_numpy(array)
        if self.runtime.device.type == "cuda":
            source = source.pin_memory()  # torch keeps such memory until its copy is over
        return source.to(self.runtime.device, non_blocking=True)
