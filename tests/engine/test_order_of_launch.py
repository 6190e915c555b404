"""What the host does before the device begins with a prompt, and what it leaves until then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from antiphon.engine.device_executor import DeviceExecutor
from antiphon.engine.device_runtime import Completion, HostRuntime
from antiphon.engine.device_sampler import DeviceSampler
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import RequestKind


class WatchedRuntime(HostRuntime):
    """Calls back when work was issued, and when it is waited for."""

    def __init__(self, issued: Callable[[], None], waited: Callable[[], None]) -> None:
        super().__init__()
        self._issued, self._waited = issued, waited

    def submit(self, issue: Callable[[], None]) -> Completion:
        """Issue it and say so."""
        super().submit(issue)
        self._issued()
        return Watched(self._waited)


@dataclass
class Watched:
    """Work whose end somebody waits for."""

    wait: Callable[[], None]


def _watched(
    kit: Any, issued: Callable[[], None], waited: Callable[[], None] = lambda: None, **more: Any
) -> EngineLoop:
    return EngineLoop(
        kit.FakeModel(),
        kit.settings(overlap=True, decode_graphs=True, chunk_graph_tokens=(32,)),
        executor=lambda *built: DeviceExecutor(*built, WatchedRuntime(issued, waited)),
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


def test_the_first_step_follows_the_chunks_without_a_word_from_them(kit: Any) -> None:
    heard: list[str] = []
    loop = _watched(kit, lambda: heard.append("issued"), lambda: heard.append("waited"))
    loop.submit(kit.request("r", kit.prompt_of(60)))
    for _ in range(3):
        loop.step()
    chunk, last_chunk, step = ["issued"], ["issued", "issued"], ["issued"]
    assert heard == [*chunk, *last_chunk, "waited", *step, "waited"], "the last chunk's choice is its own"


def test_what_the_choice_needs_is_written_while_the_forward_pass_runs(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a step on its way nothing waits for the host, and one copy brings everything."""
    heard: list[str] = []
    loop = _watched(kit, lambda: heard.append("issued"))
    prepare = DeviceSampler.prepare

    def heard_prepare(*arguments: Any) -> Any:
        heard.append("prepared")
        return prepare(*arguments)

    monkeypatch.setattr(DeviceSampler, "prepare", heard_prepare)
    loop.submit(kit.request("r", kit.prompt_of(20), kind=RequestKind.REMOTE_KV))
    loop.step()
    loop.kv_ready("r", 1)
    loop.step()
    assert heard == ["issued", "prepared", "issued"]
    heard.clear()
    loop.step()
    assert heard == ["prepared", "issued"]


def test_pages_of_a_reservation_are_named_while_its_kv_comes(kit: Any) -> None:
    loop = kit.loop("overlapped")
    loop.submit(kit.request("r", kit.prompt_of(100), kind=RequestKind.REMOTE_KV))
    loop.step()
    assert _keys(loop) == 6


@pytest.mark.parametrize("kind", [RequestKind.COLOCATED, RequestKind.PREFILL_ONLY])
def test_the_start_of_a_prompt_is_said_once_the_device_computes(kit: Any, kind: RequestKind) -> None:
    heard: list[str] = []
    loop = _watched(
        kit,
        lambda: heard.append("issued"),
        on_scheduled=lambda event: heard.append(type(event).__name__),
        on_kv_written=lambda event: heard.append(f"written {event.layer_group}"),
    )
    loop.submit(kit.request("r", kit.prompt_of(20), kind=kind))
    loop.step()
    if kind is RequestKind.COLOCATED:
        assert heard == ["issued", "issued", "PrefillStarted"], "a chunk, and the choice of its token"
    else:
        # The stand-in calls back between its parts, before it says that all was issued.
        assert heard == ["PrefillStarted", "written 0", "written 1", "issued"]


def test_the_start_of_a_cached_prompt_is_said_before_what_it_finds(kit: Any) -> None:
    heard: list[str] = []
    loop = _watched(
        kit,
        lambda: None,
        on_scheduled=lambda event: heard.append(f"started, {event.cached_tokens} cached"),
        on_kv_written=lambda event: heard.append(f"written {event.layer_group}"),
    )
    for number in range(2):
        heard.clear()
        loop.submit(kit.request(f"r{number}", kit.prompt_of(33), kind=RequestKind.PREFILL_ONLY))
        loop.step()
        loop.step()
    assert heard == ["started, 32 cached", "written 0", "written 1"]


def test_a_reservation_is_said_before_the_launch(kit: Any) -> None:
    """A prefill worker waits for it, and the device has the step before."""
    heard: list[str] = []
    loop = _watched(
        kit, lambda: heard.append("issued"), on_scheduled=lambda event: heard.append(type(event).__name__)
    )
    loop.submit(kit.request("running", (1,), kind=RequestKind.REMOTE_KV, max_tokens=50))
    loop.step()
    heard.clear()
    loop.submit(kit.request("r", kit.prompt_of(20), kind=RequestKind.REMOTE_KV))
    loop.step()
    assert heard == ["PagesReserved", "issued"]
