"""Reading the body of a request: whole, within a size, and from a client that really sends it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from antiphon.configs.front_end import RouterConfig
from antiphon.router.openai.errors import body_too_large, body_too_slow, invalid


async def read_body(request: Request, config: RouterConfig) -> bytes:
    """The whole body.

    It may take ``body_timeout_s`` and what its bytes take at ``body_min_bytes_per_s``, and may not stop for
    ``body_timeout_s``: without the former a client holds its connection with a byte now and then, without
    the latter one that has sent a lot may stop for long.

    Raises:
        ApiError: 413 beyond the limit; 400 for a content length that is no number, or an encoded body; 408
            when the client stops in its middle or sends it too slowly.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        raise invalid(
            f"A body of content-encoding '{encoding[:32]}' cannot be read; send it as it is.",
            None,
            "invalid_header",
        )
    limit_bytes = config.max_body_bytes
    declared = request.headers.get("content-length")
    if declared is not None:
        if not declared.isdecimal():
            raise invalid("Content-Length is not a number.", None, "invalid_header")
        if int(declared) > limit_bytes:
            raise body_too_large(limit_bytes)
    chunks: list[bytes] = []
    size = 0
    parts = request.stream()
    now = asyncio.get_running_loop().time
    began = now()
    while True:
        due = began + config.body_timeout_s + size / config.body_min_bytes_per_s
        try:
            async with asyncio.timeout_at(min(due, now() + config.body_timeout_s)):
                chunk = await anext(parts)
        except StopAsyncIteration:
            break
        except TimeoutError:
            raise body_too_slow(size, now() - began) from None
        size += len(chunk)
        if size > limit_bytes:
            raise body_too_large(limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)
