"""Further choices of a prompt: they wait for the first one, then share the pages of its prompt."""

from __future__ import annotations

from antiphon.decode_worker.requests import DecodeRequest


class Forks:
    """Requests that were not handed to the engine yet, by the request whose first token they wait for.

    By then the prompt's whole pages are in the prefix cache, held by the first choice, so the others start
    from them: what they compute themselves is the rest of the prompt behind its last whole page.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[DecodeRequest]] = {}

    def wait(self, first: DecodeRequest, request: DecodeRequest) -> None:
        """Keep a request until the first one speaks or ends."""
        self._waiting.setdefault(first.message.request_id, []).append(request)

    def take(self, request_id: str) -> list[DecodeRequest]:
        """Those that waited for this request, in the order in which they came."""
        return self._waiting.pop(request_id, [])

    def drop(self, request: DecodeRequest) -> bool:
        """Forget a request; False when it does not wait."""
        waiting = self._waiting.get(request.message.fork_of, [])
        if request not in waiting:
            return False
        waiting.remove(request)
        return True
