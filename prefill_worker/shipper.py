"""From "these layers of these pages are computed" to one write per destination rank and its notification."""

from __future__ import annotations

from collections.abc import Callable

import torch

from antiphon.engine.events import KvWritten
from antiphon.kv_transfer.checksum import crc32_of
from antiphon.kv_transfer.handshake import PeerKv, RankPages, page_pairs
from antiphon.kv_transfer.plan import group_layouts, layer_range, plan_runs
from antiphon.kv_transfer.transfer_thread import TransferThread, WriteOutcome
from antiphon.kv_transfer.transport import Copies
from antiphon.prefill_worker.jobs import PrefillJob
from antiphon.protocol.codec import encode
from antiphon.protocol.errors import TransferError
from antiphon.protocol.identity import KvFingerprint
from antiphon.protocol.messages import WriteChecksum, WriteDone, WriteKey

OnShipped = Callable[[WriteKey, WriteOutcome, int], None]
"""Called on the transfer thread with the key, how it ended and the bytes that were sent."""


class Shipper:
    """Plans and posts the writes of one source rank."""

    def __init__(
        self,
        fingerprint: KvFingerprint,
        pages: RankPages,
        transfer: TransferThread,
        layer_groups: int,
        epoch: int,
        *,
        verify_checksums: bool,
    ) -> None:
        self._layouts = group_layouts(fingerprint)
        self._page_size = fingerprint.page_size_tokens
        self._pages = pages
        self._transfer = transfer
        self._layer_groups = layer_groups
        self._epoch = epoch
        self._verify_checksums = verify_checksums

    def keys(self, chunks: int) -> frozenset[WriteKey]:
        """Every write of a request of so many chunks."""
        rank = self._pages.shard.rank
        return frozenset(
            WriteKey(rank, chunk, group) for chunk in range(chunks) for group in range(self._layer_groups)
        )

    def key(self, event: KvWritten) -> WriteKey:
        """The write that ships what this event says is computed."""
        return WriteKey(self._pages.shard.rank, event.chunk, event.layer_group)

    def ship(
        self,
        job: PrefillJob,
        event: KvWritten,
        on_shipped: OnShipped,
        source_ready: Callable[[], bool] | None,
    ) -> None:
        """Write what ``event`` says is computed; ``on_shipped`` is called exactly once.

        With one destination rank the notification travels with the write. With several it is sent to rank 0
        once all of them are done; with nothing to write (the peer has the pages) it is sent at once.
        """
        key = self.key(event)
        parts = [(rank, copies) for rank in job.decode_kv.ranks if (copies := self._copies(job, event, rank))]
        size = sum(part.total_bytes for _, copies in parts for part in copies)
        lead = job.decode_kv.ranks[0].agent_name
        if self._verify_checksums and len(parts) == 1:
            job.checksums[key] = self._checksum(parts[0][1])
        notification = self.notification(job, key)

        def finished(outcome: WriteOutcome) -> None:
            on_shipped(key, outcome, size)

        if len(parts) == 1 and parts[0][0].agent_name == lead:
            self._transfer.write(lead, parts[0][1], notification, finished, source_ready)
            return
        left = len(parts)
        first_error: TransferError | None = None

        def one_done(outcome: WriteOutcome) -> None:
            nonlocal left, first_error
            left -= 1
            first_error = first_error or outcome.error
            if left > 0:
                return
            if first_error is not None:
                finished(WriteOutcome(first_error, outcome.seconds))
            else:
                self._transfer.notify(lead, notification, finished)

        for rank, copies in parts:
            self._transfer.write(rank.agent_name, copies, b"", one_done, source_ready)
        if not parts:
            self._transfer.notify(lead, notification, finished)

    def notify_again(
        self, peer: PeerKv, notification: bytes, on_done: Callable[[WriteOutcome], None]
    ) -> None:
        """Repeat the notification of a write that is done."""
        self._transfer.notify(peer.ranks[0].agent_name, notification, on_done)

    def notification(self, job: PrefillJob, key: WriteKey) -> bytes:
        """The WriteDone of one write, encoded."""
        request_id, attempt = job.key
        decode_epoch, checksum = job.request.ticket.decode_epoch, job.checksums.get(key)
        return encode(WriteDone(request_id, attempt, self._epoch, decode_epoch, key, checksum))

    def _checksum(self, copies: list[Copies]) -> WriteChecksum:
        """Of bytes that are final in host memory: the source pages are neither computed nor freed again."""
        group_of = {span: group for group, span in self._pages.spans.items()}
        spans, crc = [], 0
        for part in copies:
            crc = crc32_of(part.source, part.runs[:, [0, 2]], crc)
            spans += [(group_of[part.source], to, length) for _, to, length in part.runs.tolist()]
        return WriteChecksum(spans, crc)

    def _copies(self, job: PrefillJob, event: KvWritten, rank: RankPages) -> list[Copies]:
        ticket = job.request.ticket
        wanted = {
            "full": (event.full_pages, ticket.full_pages, ticket.skip_tokens // self._page_size),
            "sliding": (event.sliding_pages, ticket.sliding_pages, ticket.sliding_first_page),
        }
        copies = []
        for group, (computed, remote, first) in wanted.items():
            layout = self._layouts[group]
            pairs = page_pairs(computed, remote, first)
            layers = layer_range(layout.layers, event.layer_group, self._layer_groups)
            runs = plan_runs(layout, self._pages.shard, rank.shard, pairs, layers)
            if len(runs):
                copies.append(Copies(self._pages.spans[group], rank.spans[group], runs))
        return copies


def source_fence(device: torch.device) -> Callable[[], bool] | None:
    """Whether everything issued so far on the current stream of the calling thread is done; None on CPUs."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query
