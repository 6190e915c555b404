"""The store of responses of one router, or of the routers of one machine: an SQLite database."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable

import orjson

from antiphon.router.openai.response_store import JsonObject, StoredResponse

_SCHEMA = """
create table if not exists responses (
    id text primary key, stored_at real not null, bytes integer not null,
    response blob not null, history blob not null, input_items blob not null
) without rowid;
create index if not exists responses_by_age on responses (stored_at);
create table if not exists items (
    id text primary key, response_id text not null references responses (id) on delete cascade,
    item blob not null
) without rowid;
create index if not exists items_by_response on items (response_id);
"""


class SqliteResponseStore:
    """A ``ResponseStore`` in one file, or in memory for ``path`` None. The oldest go first.

    Commits are not forced to the disk: a crash of the machine may lose the last seconds, never the file.
    Calls are quick and made on the event loop.
    """

    def __init__(
        self,
        path: str | None,
        *,
        max_bytes: int,
        max_age_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._database = sqlite3.connect(path or ":memory:", isolation_level=None)
        self._database.execute("pragma journal_mode = wal")
        self._database.execute("pragma synchronous = normal")
        self._database.execute("pragma foreign_keys = on")
        self._database.execute("pragma busy_timeout = 1000")
        self._database.executescript(_SCHEMA)

    async def put(self, stored: StoredResponse) -> None:
        """Keep a response and its output items, and drop what is too old or too much."""
        now = self._clock()
        blobs = [orjson.dumps(part) for part in (stored.response, stored.history, stored.input_items)]
        size = sum(map(len, blobs))
        response_id = str(stored.response["id"])
        with self._transaction():
            self._database.execute(
                "insert or replace into responses values (?, ?, ?, ?, ?, ?)", (response_id, now, size, *blobs)
            )
            self._database.executemany(
                "insert or replace into items values (?, ?, ?)",
                [(str(item["id"]), response_id, orjson.dumps(item)) for item in stored.output_items()],
            )
            self._drop_old(now)

    async def get(self, response_id: str) -> StoredResponse | None:
        """A response that is still kept."""
        row = self._database.execute(
            "select response, history, input_items from responses where id = ? and stored_at > ?",
            (response_id, self._clock() - self._max_age_s),
        ).fetchone()
        return None if row is None else StoredResponse(*map(orjson.loads, row))

    async def item(self, item_id: str) -> JsonObject | None:
        """An output item of a response that is still kept."""
        row = self._database.execute(
            "select item from items join responses on responses.id = response_id "
            "where items.id = ? and stored_at > ?",
            (item_id, self._clock() - self._max_age_s),
        ).fetchone()
        if row is None:
            return None
        item: JsonObject = orjson.loads(row[0])
        return item

    async def delete(self, response_id: str) -> bool:
        """Forget a response; False when there is none."""
        return self._database.execute("delete from responses where id = ?", (response_id,)).rowcount > 0

    async def close(self) -> None:
        """Close the database."""
        self._database.close()

    def _drop_old(self, now: float) -> None:
        self._database.execute("delete from responses where stored_at <= ?", (now - self._max_age_s,))
        # Everything older than the newest responses that fit; the newest itself always stays.
        self._database.execute(
            "delete from responses where id in ("
            "select id from (select id, row_number() over newest as place, sum(bytes) over newest as total "
            "from responses window newest as (order by stored_at desc, id rows unbounded preceding)) "
            "where total > ? and place > 1)",
            (self._max_bytes,),
        )

    def _transaction(self) -> _Transaction:
        return _Transaction(self._database)


class _Transaction:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("begin immediate")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._database.execute("commit" if kind is None else "rollback")
