"""Troubles of workers and clients, each brought about when it has an effect, and held until that shows.

What a scrape sees of a short-lived state is luck. So a process is stopped (SIGSTOP) in the middle of it: what
its peer then waits for stays as it is for as long as wanted, and the peer's page shows it to every scrape.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import httpx
from observed_deployment import Observed, until

PREEMPTIONS = "antiphon_preemptions_total"
EFFECT_S = 5.0
"""Within this a trouble has its effect, or is brought about at a better moment the next time."""


@contextmanager
def stopped(pid: int) -> Iterator[int]:
    """A process stands still until the block ends, or dies in it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Troubles:
    """Brings trouble to a deployment of one prefill and one decode worker, under load.

    ``seen_after_s``: for how long a state is kept after it showed on a process's page.
    """

    def __init__(self, observed: Observed, seen_after_s: float) -> None:
        self._observed = observed
        self._seen_after_s = seen_after_s

    def kill_prefill(self) -> None:
        """End the prefill worker while the decode worker waits for its KV."""
        with self._stopped_prefill() as pid:
            os.kill(pid, signal.SIGKILL)

    def kill_decode(self) -> None:
        """End the decode worker while it generates."""
        until(lambda: self._value("decode-0", "antiphon_num_requests_running"), 120)
        os.kill(self._observed.pid_of("DecodeActor"), signal.SIGKILL)

    def hold_writes(self) -> None:
        """Stop the decode worker: writes of the prefill worker stay under way, computed prompts pinned."""
        self._until_prompts_compute()
        writes, pinned = "antiphon_kv_transfers_in_flight", "antiphon_num_requests_pinned"
        with stopped(self._observed.pid_of("DecodeActor")):
            if self._shows(lambda: self._value("prefill-0", writes) and self._value("prefill-0", pinned)):
                time.sleep(self._seen_after_s)

    def hold_prompts(self, seconds: float) -> None:
        """Stop the prefill worker, so long that it is asked for its writes and given up."""
        with self._stopped_prefill():
            time.sleep(seconds)

    def leave_held_prompt(self) -> None:
        """A client leaves while the prefill worker, which writes its KV, is stopped.

        The pages of its request stay out of use until the worker goes on. Without other load: then the prompt
        that computes is its own.
        """
        until(lambda: not self._value("prefill-0", "antiphon_queued_prefill_tokens"), 120)
        prompt = f"{time.monotonic()} " + "wave " * 1500  # in no cache
        body = f'{{"model": "gpt-oss-tiny", "prompt": "{prompt}", "stream": true}}'
        with self._client("/v1/completions", body) as client:
            if not self._shows(lambda: 0 < self._value("prefill-0", "antiphon_queued_prefill_tokens") < 1400):
                return
            with stopped(self._observed.pid_of("PrefillActor")):
                client.close()
                if self._shows(lambda: self._value("decode-0", "antiphon_num_requests_quarantined")):
                    time.sleep(self._seen_after_s)

    def crowd(self, requests: int, tokens: int) -> None:
        """More long answers at a time than the decode worker's pages hold; without other load.

        They are read until one had to give its pages back, which is long before their end.
        """
        over = threading.Event()

        def read(number: int) -> bool:
            body = {
                "model": "gpt-oss-tiny",
                "messages": [{"role": "user", "content": f"{number} " + "sea " * 40}],
                "temperature": 0,
                "max_completion_tokens": tokens,
                "stream": True,
            }
            with self._observed.http.stream("POST", "/v1/chat/completions", json=body) as answer:
                for _ in answer.iter_lines():
                    if over.is_set():
                        break
                return answer.status_code == 200

        def ask(number: int) -> None:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not over.is_set():  # others take places, a worker may start
                with suppress(httpx.TransportError):
                    if read(number):
                        return
                over.wait(0.1)

        before = self._value("decode-0", PREEMPTIONS)
        asking = [threading.Thread(target=ask, args=(i,)) for i in range(requests)]
        for thread in asking:
            thread.start()
        while any(thread.is_alive() for thread in asking):
            if self._value("decode-0", PREEMPTIONS) > before:
                over.set()
            time.sleep(0.1)

    def stop_reading(self) -> None:
        """A client takes nothing from its socket until it is cut off; sooner without other load."""
        cut = self._value("router-0", "antiphon_slow_clients_total")
        body = (
            '{"model": "gpt-oss-tiny", "stream": true, "n": 2, "logprobs": true, "top_logprobs": 20,'
            '"max_completion_tokens": 1500, "messages": [{"role": "user", "content": "go on"}]}'
        )
        with self._client("/v1/chat/completions", body):
            self._shows(lambda: self._value("router-0", "antiphon_slow_clients_total") > cut, 60)

    @contextmanager
    def _stopped_prefill(self) -> Iterator[int]:
        """The process id of the prefill worker, which stands still while the decode worker waits for it."""
        deadline = time.monotonic() + 120
        while True:
            self._until_prompts_compute()
            with stopped(self._observed.pid_of("PrefillActor")) as pid:
                if self._value("decode-0", "antiphon_num_requests_awaiting_kv"):
                    yield pid
                    return
            assert time.monotonic() < deadline, "the prefill worker was never stopped in time"

    @contextmanager
    def _client(self, path: str, body: str) -> Iterator[socket.socket]:
        """One that has asked, and whose socket holds little."""
        where = urlsplit(self._observed.url)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            # The sender's buffer grows with the size of a segment, which is 64 KiB on loopback.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
            client.connect((where.hostname, where.port))
            client.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            yield client

    def _until_prompts_compute(self) -> None:
        until(lambda: "prefill-0" in self._observed.pages(), 120)
        until(lambda: self._value("prefill-0", "antiphon_queued_prefill_tokens"), 120)

    @staticmethod
    def _shows(condition: Callable[[], object], seconds: float = EFFECT_S) -> bool:
        """Whether it comes about in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _value(self, process: str, metric: str) -> float:
        """The sum of a metric's series on a process's page; 0 while there is no such page."""
        page = self._observed.pages().get(process)
        if page is None:
            return 0.0
        try:
            text = httpx.get(page, trust_env=False, timeout=30).text
        except (httpx.NetworkError, httpx.RemoteProtocolError):  # of one that was killed, and is listed still
            return 0.0
        return sum(float(found) for found in re.findall(rf"^{metric}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
