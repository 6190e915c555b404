"""The store of responses in SQLite: bounds, age, items, survival."""

from __future__ import annotations

import pytest

from antiphon.configs.front_end import ResponseStoreConfig
from antiphon.protocol.errors import ConfigError
from antiphon.router.openai.response_store import StoredResponse
from antiphon.router.openai.sqlite_response_store import SqliteResponseStore
from antiphon.router.server import open_store


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def stored(name: str, size: int = 10, history: list | None = None) -> StoredResponse:
    output = [{"type": "message", "id": f"msg_{name}", "text": "x" * size}]
    return StoredResponse({"id": f"resp_{name}", "output": output}, history or [], [{"role": "user"}])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(clock):
    store = SqliteResponseStore(None, max_bytes=5000, max_age_s=60, clock=clock)
    yield store
    await store.close()


async def test_what_is_put_comes_back(store):
    await store.put(stored("a", history=[{"h": 1}]))
    found = await store.get("resp_a")
    assert found == stored("a", history=[{"h": 1}])
    assert [*found.conversation()] == [{"h": 1}, {"role": "user"}, found.response["output"][0]]
    assert (await store.item("msg_a"))["text"] == "x" * 10
    assert await store.get("resp_b") is None
    assert await store.item("msg_b") is None


async def test_deleting_takes_the_items_along(store):
    await store.put(stored("a"))
    assert await store.delete("resp_a")
    assert await store.get("resp_a") is None
    assert await store.item("msg_a") is None
    assert not await store.delete("resp_a")


async def test_age_ends_a_response(store, clock):
    await store.put(stored("a"))
    clock.now += 59
    assert await store.get("resp_a")
    clock.now += 1
    assert await store.get("resp_a") is None
    assert await store.item("msg_a") is None


async def test_size_drops_the_oldest_but_never_the_newest(store, clock):
    for name in "abcd":
        clock.now += 1
        await store.put(stored(name, size=1500))
    assert [name for name in "abcd" if await store.get(f"resp_{name}")] == ["b", "c", "d"]
    assert await store.item("msg_a") is None
    clock.now += 1
    await store.put(stored("huge", size=9000))
    assert [name for name in ("b", "c", "d", "huge") if await store.get(f"resp_{name}")] == ["huge"]


async def test_a_file_outlives_the_process_and_is_shared(tmp_path):
    path = str(tmp_path / "responses.sqlite")
    first = SqliteResponseStore(path, max_bytes=5000, max_age_s=60)
    second = SqliteResponseStore(path, max_bytes=5000, max_age_s=60)
    await first.put(stored("a"))
    assert await second.get("resp_a")
    await first.close()
    await second.close()
    third = SqliteResponseStore(path, max_bytes=5000, max_age_s=60)
    assert await third.item("msg_a")
    await third.close()


async def test_a_file_that_is_no_store_is_one_clear_error(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database " * 100)
    with pytest.raises(ConfigError, match=r"router\.response_store\.path .*notes\.txt"):
        await open_store(ResponseStoreConfig(path=str(path)))
    with pytest.raises(ConfigError, match=r"router\.response_store\.path"):
        await open_store(ResponseStoreConfig(path=str(tmp_path / "no" / "folder" / "x")))
