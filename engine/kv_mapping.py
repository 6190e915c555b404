"""What one rank's GPU does with KV memory of other processes of its host: export, map, copy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from antiphon.configs.schema import DeploymentConfig
from antiphon.kernels.ipc.memory import CudaIpcMemory, IpcMemoryError
from antiphon.kernels.ipc.run_copy import RunCopier, RunningCopy, SpanCopy, serves
from antiphon.protocol.errors import ConfigError

_log = logging.getLogger(__name__)


class KvMapping:
    """Implements ``kv_transfer.peer_memory.PeerMemory`` on an H200; for one thread at a time.

    Args:
        blocks: of each copy's launch, see ``RunCopier``.

    Raises:
        KernelLibraryError: the copies' library was not built.
    """

    def __init__(self, device: torch.device, blocks: int | None = None) -> None:
        self._memory = CudaIpcMemory(device)
        self._copier = RunCopier(device, blocks)

    def export(self, address: int, size_bytes: int) -> tuple[bytes, int]:
        """See PeerMemory."""
        return self._memory.export(address, size_bytes)

    def open(self, handle: bytes) -> tuple[int, int | None]:
        """See PeerMemory."""
        address = self._memory.open(handle)
        try:
            return address, self._memory.size(address)
        except IpcMemoryError as error:
            _log.warning("a peer is taken at its word for how much memory it offers: %s", error)
            return address, None

    def close(self, address: int) -> None:
        """See PeerMemory."""
        self._memory.close(address)

    def copy(self, parts: Sequence[SpanCopy], after: int | None) -> RunningCopy:
        """See PeerMemory."""
        return self._copier.copy(parts, after)


@dataclass(frozen=True, slots=True)
class HostMapping:
    """Implements ``kv_transfer.mapped_transport.HostReach``."""

    memory: KvMapping | None
    obstacle: str
    required: bool


def host_mapping(config: DeploymentConfig, device: torch.device) -> HostMapping | None:
    """How this rank reaches GPUs of its host; None where KV does not move between GPUs.

    Raises:
        ConfigError: ``transfer.same_host`` is required and this GPU cannot.
        KernelLibraryError: the copies' library was not built.
    """
    mode = config.transfer.same_host
    if not config.between_gpus:
        return None
    if mode == "never":
        return HostMapping(None, "transfer.same_host is never", required=False)
    if serves(device):
        return HostMapping(KvMapping(device), "", mode == "required")
    obstacle = f"{torch.cuda.get_device_name(device)} does not run the copies' kernels, which are an H200's"
    if mode == "required":
        raise ConfigError(f"transfer.same_host required: {obstacle}")
    return HostMapping(None, obstacle, required=False)
