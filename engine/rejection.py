"""Why an engine does not take a request."""

from __future__ import annotations

from antiphon.protocol.errors import AntiphonError


class RequestRejected(AntiphonError):
    """A request was not taken; ``retryable`` when the same one may be taken later or elsewhere."""

    def __init__(self, request_id: str, reason: str, *, retryable: bool = False) -> None:
        super().__init__(f"request {request_id}: {reason}")
        self.request_id = request_id
        self.reason = reason
        self.retryable = retryable
