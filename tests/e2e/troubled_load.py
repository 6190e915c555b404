"""Load of many kinds on a deployment: what succeeds, is refused, is cut off."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import httpx
from observed_deployment import Observed

CLIENTS = 4


class TroubledLoad:
    """Runs from the beginning of its block to the end.

    ``answers`` counts those that came, ``unanswered`` requests that were left waiting.
    """

    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._stop = threading.Event()
        self._flows = threading.Event()
        self._flows.set()
        self._threads = [
            *(threading.Thread(target=self._ask_on, args=(i,)) for i in range(CLIENTS)),
            threading.Thread(target=self._knock_on),
            threading.Thread(target=self._leave_on),
        ]
        self.answers = 0
        self.unanswered = 0

    def __enter__(self) -> TroubledLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._flows.set()
        for thread in self._threads:
            thread.join()

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Nothing more is asked until the block ends; what was asked goes on."""
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()

    def _next(self, pause_s: float = 0.0) -> bool:
        """Whether to ask something, after a pause; when, if the load is held back."""
        self._stop.wait(pause_s)
        self._flows.wait()
        return not self._stop.is_set()

    def _chat(self, text: str, headers: dict[str, str] | None = None, **more: object) -> int:
        """The answer's status; 0 where the connection was lost, or nothing came."""
        try:
            return self._observed.chat(text, headers, **more).status_code
        except httpx.TimeoutException:
            self.unanswered += 1
        except httpx.TransportError:
            pass
        return 0

    def _complete(self) -> None:
        """A success without chat format, hence without repairs: their share then changes for certain.

        Chat answers of random weights lack their header every time, so that of them alone it is a constant.
        """
        body = {"model": "gpt-oss-tiny", "prompt": "go on", "max_tokens": 2}
        with suppress(httpx.TransportError):
            self._observed.http.post("/v1/completions", json=body)

    def _ask_on(self, number: int) -> None:
        chance = random.Random(number)
        while self._next():
            words, tokens = chance.randint(5, 1500), chance.randint(2, 40)
            headers = {"traceparent": f"00-{chance.randbytes(16).hex()}-{chance.randbytes(8).hex()}-01"}
            # Mostly another beginning: what caches have is neither computed nor transferred.
            text = f"{chance.randrange(8)} " + "wave " * words
            status = self._chat(text, headers, max_completion_tokens=tokens, temperature=1)
            self.answers += status == 200
            if status != 200:
                self._stop.wait(0.5)

    def _knock_on(self) -> None:
        """What is turned away, refused or tolerated."""
        while self._next(0.2):
            self._chat("hi", model="no-such-model")
            self._chat("hi", tools=[{"type": "web_search"}], max_completion_tokens=2)
            self._complete()
            with suppress(httpx.TransportError):
                self._observed.http.post("/v1/completions", content=b"{")
            knocks = [
                threading.Thread(target=lambda: self._chat("hi", max_completion_tokens=4)) for _ in range(6)
            ]
            for knock in knocks:
                knock.start()
            for knock in knocks:
                knock.join()

    def _leave_on(self) -> None:
        """Clients that go away in the middle."""
        while self._next(0.3):
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
