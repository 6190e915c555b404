"""The store of responses: bounds, age, items, survival."""

from __future__ import annotations

import pytest

from antiphon.configs.schema import ResponseStoreConfig
from antiphon.protocol.errors import ConfigError
from antiphon.router.openai.response_store import SqliteResponseStore, StoredResponse
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
def store(clock):
    store = SqliteResponseStore(None, max_bytes=5000, max_age_s=60, clock=clock)
    yield store
    store.close()


def test_what_is_put_comes_back(store):
    store.put(stored("a", history=[{"h": 1}]))
    found = store.get("resp_a")
    assert found == stored("a", history=[{"h": 1}])
    assert [*found.conversation()] == [{"h": 1}, {"role": "user"}, found.response["output"][0]]
    assert store.item("msg_a")["text"] == "x" * 10
    assert store.get("resp_b") is None
    assert store.item("msg_b") is None


def test_deleting_takes_the_items_along(store):
    store.put(stored("a"))
    assert store.delete("resp_a")
    assert store.get("resp_a") is None
    assert store.item("msg_a") is None
    assert not store.delete("resp_a")


def test_age_ends_a_response(store, clock):
    store.put(stored("a"))
    clock.now += 59
    assert store.get("resp_a")
    clock.now += 1
    assert store.get("resp_a") is None
    assert store.item("msg_a") is None


def test_size_drops_the_oldest_but_never_the_newest(store, clock):
    for name in "abcd":
        clock.now += 1
        store.put(stored(name, size=1500))
    assert [name for name in "abcd" if store.get(f"resp_{name}")] == ["b", "c", "d"]
    assert store.item("msg_a") is None
    clock.now += 1
    store.put(stored("huge", size=9000))
    assert [name for name in ("b", "c", "d", "huge") if store.get(f"resp_{name}")] == ["huge"]


def test_a_file_outlives_the_process_and_is_shared(tmp_path):
    path = str(tmp_path / "responses.sqlite")
    first = SqliteResponseStore(path, max_bytes=5000, max_age_s=60)
    second = SqliteResponseStore(path, max_bytes=5000, max_age_s=60)
    first.put(stored("a"))
    assert second.get("resp_a")
    first.close()
    second.close()
    third = SqliteResponseStore(path, max_bytes=5000, max_age_s=60)
    assert third.item("msg_a")
    third.close()


def test_a_file_that_is_no_store_is_one_clear_error(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database " * 100)
    with pytest.raises(ConfigError, match=r"router\.response_store\.path .*notes\.txt"):
        open_store(ResponseStoreConfig(path=str(path)))
    with pytest.raises(ConfigError, match=r"router\.response_store\.path"):
        open_store(ResponseStoreConfig(path=str(tmp_path / "no" / "folder" / "x")))
