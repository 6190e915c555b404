"""Whether anybody listens where a deployment's configuration says that Ray's head is."""

from __future__ import annotations

import asyncio

from antiphon.protocol.errors import ConfigError

HEAD_WITHIN_S = 60.0
"""A head that starts at the same time, as a pod's neighbours do, listens by then."""
RETRY_S = 0.5


async def await_head(address: str | None, within_s: float = HEAD_WITHIN_S) -> None:
    """Return once somebody listens at ``host:port``; at once for what is none, which Ray looks up itself.

    Ray's own attempt lasts for many minutes in which it says nothing and hears no signal.

    Raises:
        ConfigError: nobody listens there after ``within_s`` seconds; says why not.
    """
    host, colon, port = (address or "").rpartition(":")
    if not colon or "/" in host or not port.isdecimal():
        return
    last = "it does not answer"
    try:
        async with asyncio.timeout(within_s):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                except OSError as error:
                    last = str(error)
                else:
                    writer.close()
                    return
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise ConfigError(f"ray.address: {address}: no Ray after {within_s:.0f} s: {last}") from None
