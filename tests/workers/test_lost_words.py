"""What is staged and whose word is lost, either way, is over on both sides in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from router_stand_in import wait_until

from antiphon.configs.schema import DeploymentConfig
from antiphon.kv_transfer.in_process import Fault, InProcessNetwork
from antiphon.protocol.codec import decode
from antiphon.protocol.staging_messages import SlotFree, StagedWrite

Start = Callable[..., tuple[Any, Any]]
MakeConfig = Callable[..., DeploymentConfig]


class Scene:
    """A pair that stages in two slots and has little patience; SlotFree is lost while ``loses`` says so."""

    def __init__(self, start: Start, make_config: MakeConfig) -> None:
        self.network = InProcessNetwork()
        self.lost = 0
        self.loses: Callable[[], bool] = lambda: False
        self._notify = self.network.notify
        self.network.notify = self._perhaps_notify  # type: ignore[method-assign]
        deployment = make_config(staging_slots=2, staging_slot_mib=1, completion_timeout_s=0.4)
        self.pair, self.router = start(self.network.transport, deployment=deployment)

    def _perhaps_notify(self, sender: str, receiver: str, payload: bytes) -> None:
        if isinstance(decode(payload), SlotFree) and self.loses():
            self.lost += 1
        else:
            self._notify(sender, receiver, payload)

    def handshakes(self) -> int:
        """How many have succeeded."""
        return int(self.pair.prefill._counters["handshakes_ok"])

    def check_next(self) -> None:
        """Nothing is held, and there are slots for what comes next."""
        self.pair.wait_idle()
        names = [self.router.generate(self.router.random_prompt(90)) for _ in range(3)]
        self.router.wait(*names)
        for name in names:
            assert self.router.requests[name].tokens == self.router.requests[name].expected()
        self.pair.wait_idle()


@pytest.fixture
def scene(started: Start, make_config: MakeConfig) -> Scene:
    return Scene(started, make_config)


def is_staged(payload: bytes) -> bool:
    return bool(payload) and isinstance(decode(payload), StagedWrite)


def test_an_aborted_request_is_not_kept_by_a_lost_word(scene: Scene) -> None:
    """The decode worker does not ask for what it does not wait for any more."""
    router, network = scene.router, scene.network
    network.inject(Fault.LOSE_NOTIFICATION, match=is_staged)
    name = router.generate(router.random_prompt(90))
    wait_until(lambda: network.happened[Fault.LOSE_NOTIFICATION] == 1, what="the loss")
    router.abort(name)
    router.wait(name)
    scene.check_next()


def test_a_complete_request_is_not_kept_by_a_lost_answer(scene: Scene) -> None:
    """The KV has arrived, so that nobody asks for it."""
    router, first = scene.router, scene.lost
    scene.loses = lambda: scene.lost == first
    name = router.generate(router.random_prompt(90))
    router.wait(name)
    assert scene.lost == first + 1
    router.wait_prefilled(name)
    assert router.requests[name].tokens == router.requests[name].expected()
    scene.check_next()


def test_a_peer_that_does_not_answer_is_connected_anew(scene: Scene) -> None:
    """It hears what is written, and nothing that it says is heard."""
    router = scene.router
    scene.loses = lambda: scene.handshakes() == 1
    name = router.generate(router.random_prompt(90))
    router.wait(name)
    assert router.requests[name].tokens == router.requests[name].expected()
    router.wait_prefill_failed(name)
    failure = router.requests[name].prefill_failures[0]
    assert failure.stage == "connection"
    assert "does not say that it has spread" in failure.reason
    wait_until(lambda: scene.handshakes() > 1, what="another handshake")
    scene.check_next()
