"""What a prefill worker tells a decode worker of writes whose connection broke, and what must follow."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from antiphon.prefill_worker.correspondence import Correspondence
from antiphon.prefill_worker.jobs import PrefillJob
from antiphon.protocol.identity import Role
from antiphon.protocol.kv_messages import WriteKey, WritesDrained, WritesFailed
from antiphon.protocol.link import Peer
from antiphon.protocol.messages import KvTicket, Message, PrefillRequest

DECODE, ROUTER = Peer(Role.DECODE, "decode-0", 7), Peer(Role.ROUTER, "router-0", 1)
WRITES = [WriteKey(0, 0, 0), WriteKey(0, 0, 1)]


class Worker:
    """Stands in for the links, the ranks and the peers of one worker."""

    me = Peer(Role.PREFILL, "prefill-0", 9)

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.repeated: list[tuple[str, int, frozenset[WriteKey]]] = []
        self.distrusted: list[tuple[Peer, str]] = []
        nobody: Any = None
        node: Any = self
        self.correspondence = Correspondence(
            *(node, nobody, [node], Counter(), 5.0),
            lambda peer, reason: self.distrusted.append((peer, reason)),
        )

    def send(self, peer: Peer, message: Message) -> bool:
        self.sent.append(message)
        return True

    def repeat(self, request_id: str, attempt: int, keys: frozenset[WriteKey]) -> None:
        self.repeated.append((request_id, attempt, keys))


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def job() -> PrefillJob:
    ticket = KvTicket("decode-0", 7, "r", 3, 5, 0, [1], [1], 0)
    return PrefillJob(PrefillRequest("r", 3, [1] * 6, ticket), ROUTER, DECODE, 1, keys=frozenset(WRITES))


def test_every_time_that_a_broken_connection_is_told_another_one_is_made(
    worker: Worker, job: PrefillJob
) -> None:
    """The decode worker ends whatever connection there is by then, and takes nothing before the next one."""
    worker.correspondence.ended(job)
    assert isinstance(worker.sent[-1], WritesDrained)
    assert not worker.distrusted
    worker.correspondence.connection_broke(job, "broken")
    worker.correspondence.ended(job)
    worker.correspondence.stopped(DECODE, job.key, 7)  # asked again over another link
    assert [type(message) for message in worker.sent[1:]] == [WritesFailed] * 2
    assert worker.distrusted == [(DECODE, "broken")] * 2


def test_what_is_under_way_is_told_again_over_a_new_connection(worker: Worker, job: PrefillJob) -> None:
    worker.correspondence.connected_anew(job)
    assert not worker.repeated, "nothing is under way"
    job.posted_at = {WRITES[0]: 1e9}
    worker.correspondence.connected_anew(job)
    assert worker.repeated == [("r", 3, frozenset(WRITES[:1]))]
