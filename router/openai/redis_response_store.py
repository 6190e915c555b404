"""The store of responses that several routers share: a Redis server.

Keys, all with one hash tag, so that they live in one slot:

* ``{antiphon}:response:ID`` hash: ``response``, ``history``, ``input_items`` as JSON, and ``items``, the ids
  of its output items. Expires with its age.
* ``{antiphon}:item:ID`` an output item as JSON. Expires with its response.
* ``{antiphon}:ages`` sorted set: response ids by the server's time when they were stored, in milliseconds.
* ``{antiphon}:sizes`` hash: bytes by response id; ``{antiphon}:total`` their sum.

Changes are scripts, so each is whole or has not happened, whatever other routers do.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import Any, TypeVar

import orjson
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from antiphon.protocol.errors import ConfigError
from antiphon.router.openai.errors import ApiError, unavailable
from antiphon.router.openai.response_store import JsonObject, StoredResponse

log = structlog.get_logger("antiphon.router.store")

PASSWORD_VARIABLE = "ANTIPHON_REDIS_PASSWORD"
TIMEOUT_S = 2.0
"""A server that does not answer for this long is out of reach."""
RETRY_AFTER_S = 2.0
_PREFIX = "{antiphon}:"

_FORGET = """
local prefix = KEYS[1]
local function forget(id)
  local key = prefix .. 'response:' .. id
  local items = redis.call('hget', key, 'items')
  if items then
    for _, item in ipairs(cjson.decode(items)) do redis.call('del', prefix .. 'item:' .. item) end
  end
  redis.call('zrem', prefix .. 'ages', id)
  local size = redis.call('hget', prefix .. 'sizes', id)
  if size then
    redis.call('hdel', prefix .. 'sizes', id)
    redis.call('decrby', prefix .. 'total', size)
  end
  return redis.call('del', key)
end
"""

_PUT = (
    _FORGET
    + """
local id, size, max_bytes, max_age_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local clock = redis.call('time')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
forget(id)
local key = prefix .. 'response:' .. id
redis.call('hset', key, 'response', ARGV[5], 'history', ARGV[6], 'input_items', ARGV[7], 'items', ARGV[8])
redis.call('pexpire', key, max_age_ms)
for i = 9, #ARGV, 2 do redis.call('set', prefix .. 'item:' .. ARGV[i], ARGV[i + 1], 'px', max_age_ms) end
redis.call('zadd', prefix .. 'ages', now, id)
redis.call('hset', prefix .. 'sizes', id, size)
redis.call('incrby', prefix .. 'total', size)
local too_old = redis.call('zrangebyscore', prefix .. 'ages', '-inf', now - max_age_ms)
for _, old in ipairs(too_old) do forget(old) end
local total = tonumber(redis.call('get', prefix .. 'total'))
while total > max_bytes and redis.call('zcard', prefix .. 'ages') > 1 do
  local oldest = redis.call('zrange', prefix .. 'ages', 0, 1)
  -- Of two that were stored in one millisecond the new one may come first: it stays.
  forget(oldest[1] == id and oldest[2] or oldest[1])
  total = tonumber(redis.call('get', prefix .. 'total'))
end
"""
)

_DELETE = _FORGET + "return forget(ARGV[1])"

_Reply = TypeVar("_Reply")


class RedisResponseStore:
    """A ``ResponseStore`` in a Redis server. The server's clock counts; routers' clocks may differ."""

    def __init__(self, client: Redis, *, max_bytes: int, max_age_s: float) -> None:
        self._client = client
        self._max_bytes = max_bytes
        self._max_age_ms = max(int(max_age_s * 1000), 1)
        self._put_script = client.register_script(_PUT)
        self._delete_script = client.register_script(_DELETE)

    @classmethod
    async def connect(cls, url: str, *, max_bytes: int, max_age_s: float) -> RedisResponseStore:
        """A store that has been seen to answer.

        Raises:
            ConfigError: it does not, or the URL is none.
        """
        try:
            client = Redis.from_url(
                url,
                password=os.environ.get(PASSWORD_VARIABLE) or None,
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
            )
        except ValueError as error:
            raise ConfigError(f"router.response_store.redis_url {url}: {error}") from error
        try:
            await client.ping()
        except (RedisError, OSError) as error:
            await client.aclose()
            raise ConfigError(f"router.response_store.redis_url {url}: {error}") from error
        return cls(client, max_bytes=max_bytes, max_age_s=max_age_s)

    async def put(self, stored: StoredResponse) -> None:
        """Keep a response and its output items, and drop what is too old or too much."""
        blobs = [orjson.dumps(part) for part in (stored.response, stored.history, stored.input_items)]
        items = [(str(item["id"]), orjson.dumps(item)) for item in stored.output_items()]
        size = sum(map(len, blobs))
        arguments: list[Any] = [str(stored.response["id"]), size, self._max_bytes, self._max_age_ms, *blobs]
        arguments.append(orjson.dumps([item_id for item_id, _ in items]))
        arguments += (part for item in items for part in item)
        await _reach(self._put_script(keys=[_PREFIX], args=arguments))

    async def get(self, response_id: str) -> StoredResponse | None:
        """A response that is still kept."""
        names = ["response", "history", "input_items"]
        parts = await _reach(self._client.hmget(f"{_PREFIX}response:{response_id}", names))
        if any(part is None for part in parts):
            return None
        return StoredResponse(*(orjson.loads(part) for part in parts if part is not None))

    async def item(self, item_id: str) -> JsonObject | None:
        """An output item of a response that is still kept."""
        text = await _reach(self._client.get(f"{_PREFIX}item:{item_id}"))
        if text is None:
            return None
        item: JsonObject = orjson.loads(text)
        return item

    async def delete(self, response_id: str) -> bool:
        """Forget a response and its items; False when there is none."""
        return bool(await _reach(self._delete_script(keys=[_PREFIX], args=[response_id])))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


async def _reach(reply: Awaitable[_Reply]) -> _Reply:
    """The server's reply.

    Raises:
        ApiError: 503, there is none.
    """
    try:
        return await reply
    except (RedisError, OSError) as error:
        log.error("response_store_unreachable", error=type(error).__name__, message=str(error))
        raise _out_of_reach() from error


def _out_of_reach() -> ApiError:
    return unavailable(
        "The store of responses is out of reach. A request with 'store' false and without "
        "'previous_response_id' needs none.",
        RETRY_AFTER_S,
    )
