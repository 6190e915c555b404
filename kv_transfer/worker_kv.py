"""The KV ends of all ranks of one worker, as the process of rank 0 holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from antiphon.kv_transfer.endpoint import EndpointSettings, KvEndpoint
from antiphon.kv_transfer.plan import Shard
from antiphon.kv_transfer.probe_pages import KvPages
from antiphon.kv_transfer.rank_links import RankLinks
from antiphon.kv_transfer.ranks import RankKv
from antiphon.kv_transfer.staging import StagingMemory
from antiphon.kv_transfer.step_fences import Fence, StepFences
from antiphon.kv_transfer.transport import TransportFactory
from antiphon.protocol.codec import encode
from antiphon.protocol.identity import KvFingerprint
from antiphon.protocol.link import LinkSettings, Peer
from antiphon.protocol.link_thread import LinkThread
from antiphon.protocol.rank_messages import StepMark, WriteSample


class Followers(Protocol):
    """The other ranks of a worker, which follow rank 0's commands."""

    @property
    def size(self) -> int:
        """Ranks of the worker, rank 0 included."""

    def publish(self, message: bytes) -> None:
        """Hand every other rank a message, in order with the steps."""

    def mark(self, layer_group: int) -> StepMark:
        """Where in the order of steps rank 0 is, ``layer_group`` being the last one that it issued."""

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        """Have ``on_lost`` called, once, when a rank is lost; at once if one was."""

    def close(self) -> None:
        """Let the other ranks end."""


class WorkerKv:
    """Owns rank 0's endpoint and the links to the other ranks.

    Args:
        me: this life of the worker; its links are the worker's own.
        followers: absent for a worker of one rank.
        staging: rank 0's slots; absent, pages are written directly.
        join_timeout_s: how long the other ranks may take to register their pages.
        on_notification: called on the transfer thread with (sender's agent name, payload).
        on_failure: called when a rank's end is of no use any more.
        on_write: called on the link thread with (rank, sample) of every write of another rank that arrived.
    """

    def __init__(
        self,
        me: Peer,
        fingerprint: KvFingerprint,
        pages: KvPages,
        thread: LinkThread,
        cluster_token: str,
        links: LinkSettings,
        followers: Followers | None,
        *,
        layer_groups: int,
        write_timeout_s: float,
        verify_checksums: bool,
        join_timeout_s: float,
        on_notification: Callable[[str, bytes], None],
        on_failure: Callable[[BaseException], None],
        on_write: Callable[[int, WriteSample], None],
        staging: StagingMemory | None,
        transport_factory: TransportFactory | None,
    ) -> None:
        """Raises ConfigError when the token is too short."""
        self._thread = thread
        self._followers = followers
        self._join_timeout_s = join_timeout_s
        self._fences = StepFences()
        self._issued = 0
        size = followers.size if followers is not None else 1
        self.endpoint = KvEndpoint(
            EndpointSettings(
                me.worker_id, me.epoch, fingerprint, layer_groups, write_timeout_s, verify_checksums
            ),
            Shard(size, 0),
            pages,
            self._fences,
            staging=staging,
            on_notification=on_notification,
            on_landed=on_notification,
            on_failure=on_failure,
            transport_factory=transport_factory,
        )
        self._links: RankLinks | None = None
        if followers is not None:
            followers.watch(on_failure)
            self._links = RankLinks(
                me,
                size,
                thread,
                cluster_token,
                links,
                publish=lambda meeting: followers.publish(encode(meeting)),
                on_landed=on_notification,
                on_lost=on_failure,
                on_write=on_write,
            )
        self._ranks: tuple[RankKv, ...] = ()

    @property
    def ranks(self) -> tuple[RankKv, ...]:
        """Every rank's end, rank 0's first; empty before ``start``."""
        return self._ranks

    def start(self) -> None:
        """Register rank 0's pages and meet the other ranks; the link thread must run.

        Raises:
            TransferError: the transport cannot be opened, or cannot take the memory.
            RankLostError: another rank did not come.
        """
        self.endpoint.start()
        others = self._links.open(self._join_timeout_s) if self._links is not None else ()
        self._ranks = (self.endpoint, *others)

    def issued(self, layer_group: int, fence: Fence | None) -> StepMark:
        """Note on the engine's thread that rank 0 has issued a layer group.

        Args:
            fence: whether the device is done with it; absent when it is.

        Returns:
            the point of the steps at which every rank holds its part.
        """
        self._issued += 1
        mark = StepMark(self._issued, 0) if self._followers is None else self._followers.mark(layer_group)
        self._fences.record(mark, fence)
        return mark

    def close_links(self) -> None:
        """End the links to the other ranks; on the link thread."""
        if self._links is not None:
            self._links.close()

    def stop(self) -> None:
        """End rank 0's transfers, then let the other ranks end."""
        self.endpoint.stop()
        if self._followers is not None:
            self._followers.close()
