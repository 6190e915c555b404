"""What the host does before the device begins with a prompt, and what it leaves until then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from antiphon.engine.device_executor import DeviceExecutor
from antiphon.engine.device_runtime import Completion, HostRuntime
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import RequestKind


class WatchedRuntime(HostRuntime):
    """Calls back when work was issued."""

    def __init__(self, issued: Callable[[], None]) -> None:
        super().__init__()
        self._issued = issued

    def submit(self, issue: Callable[[], None]) -> Completion:
        """Issue it and say so."""
        completion = super().submit(issue)
        self._issued()
        return completion


def _watched(kit: Any, issued: Callable[[], None], **more: Any) -> EngineLoop:
    return EngineLoop(
        kit.FakeModel(),
        kit.settings(overlap=True, decode_graphs=True, chunk_graph_tokens=(32,)),
        executor=lambda *built: DeviceExecutor(*built, WatchedRuntime(issued)),
        **more,
    )


def _keys(loop: EngineLoop) -> int:
    (sequence,) = loop._ledger.scheduler.active
    return len(sequence._page_keys)


@pytest.mark.parametrize("kind", [RequestKind.COLOCATED, RequestKind.PREFILL_ONLY])
def test_pages_of_a_new_prompt_are_named_while_the_device_computes(kit: Any, kind: RequestKind) -> None:
    named: list[int] = []
    loop = _watched(kit, lambda: named.append(_keys(loop)))
    loop.submit(kit.request("r", kit.prompt_of(100), kind=kind))
    loop.step()
    assert named[0] == 1, "of a prompt whose first page is found nowhere no other is looked up"
    assert _keys(loop) == 6


def test_pages_of_a_reservation_are_named_while_its_kv_comes(kit: Any) -> None:
    loop = kit.loop("overlapped")
    loop.submit(kit.request("r", kit.prompt_of(100), kind=RequestKind.REMOTE_KV))
    loop.step()
    assert _keys(loop) == 6
