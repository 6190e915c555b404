"""Load of many kinds on a deployment: what succeeds, is refused, is cut off, is computed twice."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from urllib.parse import urlsplit

import httpx
from observed_deployment import Observed, until

CLIENTS = 4


class TroubledLoad:
    """Runs from the beginning of its block to the end."""

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._stop = threading.Event()
        self._threads = [
            *(threading.Thread(target=self._ask_on, args=(i,)) for i in range(CLIENTS)),
            threading.Thread(target=self._knock_on),
            threading.Thread(target=self._leave_on),
            threading.Thread(target=self._read_slowly_on),
        ]
        self.answers = 0

    def __enter__(self) -> TroubledLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def kill_busy(self, actor: str, process: str) -> None:
        """End a worker's process at a moment at which it computes."""
        page = self._observed.pages()[process]
        busy = re.compile(r"^antiphon_queued_prefill_tokens{.*} [1-9]", re.MULTILINE)
        until(lambda: busy.search(httpx.get(page, trust_env=False, timeout=30).text))
        os.kill(self._observed.pid_of(actor), signal.SIGKILL)

    def _ask_on(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stop.is_set():
            words, tokens = chance.randint(5, 1500), chance.randint(2, 40)
            headers = {"traceparent": f"00-{chance.randbytes(16).hex()}-{chance.randbytes(8).hex()}-01"}
            with suppress(httpx.TransportError):
                response = self._observed.chat(
                    "wave " * words, headers, max_completion_tokens=tokens, temperature=1
                )
                self.answers += response.status_code == 200
                if response.status_code != 200:
                    self._stop.wait(0.5)

    def _knock_on(self) -> None:
        """What is turned away, refused or tolerated."""
        while not self._stop.wait(0.2):
            with suppress(httpx.TransportError):
                self._observed.chat("hi", model="no-such-model")
                self._observed.chat("hi", tools=[{"type": "web_search"}], max_completion_tokens=2)
                self._observed.http.post("/v1/completions", content=b"{")
                knocks = [
                    threading.Thread(target=lambda: self._observed.chat("hi", max_completion_tokens=4))
                    for _ in range(6)
                ]
                for knock in knocks:
                    knock.start()
                for knock in knocks:
                    knock.join()

    def _leave_on(self) -> None:
        """Clients that go away in the middle."""
        while not self._stop.wait(0.3):
            body = {
                "model": "gpt-oss-tiny",
                "messages": [{"role": "user", "content": "word " * 200}],
                "stream": True,
            }
            with (
                suppress(httpx.TransportError),
                self._observed.http.stream("POST", "/v1/chat/completions", json=body) as response,
            ):
                for seen, _ in enumerate(response.iter_lines()):
                    if seen > 3:
                        break

    def _read_slowly_on(self) -> None:
        """A client that takes nothing from its socket until it is cut off."""
        where = urlsplit(self._observed.url)
        body = (
            b'{"model": "gpt-oss-tiny", "prompt": "go on", "stream": true, "max_tokens": 1500, "logprobs": 5}'
        )
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        while not self._stop.wait(0.2):
            with socket.socket() as client, suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                client.connect((where.hostname, where.port))
                client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
                end = time.monotonic() + 8
                while time.monotonic() < end and not self._stop.wait(0.1):
                    pass
