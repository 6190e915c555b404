"""Who is speaking: worker roles, epochs and the fingerprint that two KV peers must share."""

from __future__ import annotations

import secrets
from enum import StrEnum

import msgspec

PROTOCOL_VERSION = 8
"""Version of every message in this package. History:

1: first form.
2: decode workers may compute prompts themselves (LoadReport.computes_prompts, Reserved.computes_prompt);
   a probe's bytes follow from the writer's epoch (KvProbe), ranks of a worker speak to each other, and
   writes may be staged (KvWelcome.staging, WriteDone.part).
3: a broken connection is severed before the next welcome (KvHello.broken, KvWelcome.severed), on every rank
   (SeverWriter).
4: full layers may hold FP8 (KvFingerprint.full_kv_dtype).
5: a slot is granted to its writer (ConnectPeer.granted); GPUs of one host write into each other's pages
   (KvProbe.mapped, RankAnswer.mapped), and metadata of their transfer agents says how to map these.
6: messages of a handshake say of which they are (``handshake`` of KvHello, KvWelcome, KvRefused, KvProbe and
   KvProbeResult).
7: of three layer groups and more, the last is one layer of each page group (``layer_groups.layer_range``).
8: announcements of writes are numbered, and their answers say of which they are (``announcement`` of
   AnnounceWrites, GrantWrites and RefuseWrites).
"""

FP8_E4M3 = "fp8_e4m3"
"""KV type of pages of e4m3 numbers with a bfloat16 scale for each token and kv head."""


class Role(StrEnum):
    """What a process of the deployment does."""

    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"


def new_epoch() -> int:
    """A number that no earlier life of this process has used (63 random bits, never 0)."""
    return secrets.randbits(63) | 1


class KvFingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything two workers must agree on before a KV byte may move between them.

    ``kv_dtype`` is that of sliding layers, ``full_kv_dtype`` that of full ones, which is the same or FP8.
    ``layout`` names the order of a page's dimensions. Tensor parallelism is absent on purpose: it may
    differ, the transfer plan re-slices heads.
    """

    protocol_version: int
    model: str
    revision: str
    kv_dtype: str
    page_size_tokens: int
    full_layers: int
    sliding_layers: int
    kv_heads: int
    head_dim: int
    window_tokens: int
    layout: str
    full_kv_dtype: str

    def differences(self, other: KvFingerprint) -> list[str]:
        """One line per field that differs, naming both values; empty when compatible."""
        return [
            f"{name}: {getattr(self, name)!r} here, {getattr(other, name)!r} at the peer"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        ]


class WorkerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach one life (epoch) of one worker."""

    worker_id: str
    role: Role
    epoch: int
    endpoint: str
    """ZeroMQ endpoint of the worker's message server, e.g. ``tcp://10.0.0.7:41000``."""
    metrics_url: str = ""
    """Where its Prometheus metrics are, e.g. ``http://10.0.0.7:9465/metrics``; empty when nowhere."""


class Topology(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every worker and router of the deployment that is alive, as the supervisor last saw it."""

    version: int
    workers: tuple[WorkerAddress, ...]

    def of_role(self, role: Role) -> tuple[WorkerAddress, ...]:
        """The workers (or routers) of one role, in a stable order."""
        return tuple(w for w in self.workers if w.role is role)
