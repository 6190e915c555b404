"""What a decode worker remembers of one request while its engine works on it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.protocol.link import Peer
from antiphon.protocol.messages import GenerateRequest


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request of one router.

    ``submitted_attempt`` is the attempt that the engine was given, ``attempt`` the one it is at: the engine
    adds one whenever it needs the KV again.
    """

    message: GenerateRequest
    router: Peer
    submitted_attempt: int
    attempt: int
    emitted: list[int] = field(default_factory=list)
    """Output tokens so far, those of earlier attempts included."""
    received_at: float = field(default_factory=time.monotonic)
    transfer_s: float = 0.0
    runnable_at: float | None = None
    """When its KV was complete, until its first tokens come."""
    ending: bool = False
    """The engine was told to end it: a reservation that it reports from now on is already void."""
    moving: bool = False
    """Ended in the engine only to be submitted again with other pages."""
    successor: GenerateRequest | None = None
    """The router asked again with a later attempt while this one was still ending."""
    shares_prompt: bool = False
    """The pages of its prompt were here: as long as they are, the engine computes what little is missing."""
    taken: bool = False
    """This worker has taken it, or an earlier attempt of it."""
    silent: bool = False
    """The router is gone or has moved on: it is told nothing more."""

    @classmethod
    def of(cls, message: GenerateRequest, router: Peer) -> DecodeRequest:
        """A request as it arrived."""
        return cls(message, router, message.attempt, message.attempt, list(message.output_token_ids))

    def follow(self, message: GenerateRequest) -> DecodeRequest:
        """The later attempt that the router asked for, once this one has ended."""
        later = DecodeRequest.of(message, self.router)
        later.taken = True
        return later

    @property
    def has_spoken(self) -> bool:
        """Whether this worker has sampled for it."""
        return len(self.emitted) > len(self.message.output_token_ids)

    def deadline_s(self) -> float | None:
        """Time left for the whole request."""
        if self.message.deadline_s is None:
            return None
        return max(0.0, self.message.deadline_s - (time.monotonic() - self.received_at))

    def for_engine(self, local_prefill_limit: float) -> EngineRequest:
        """What the engine is to do from here; it computes prompts of at most so many tokens itself."""
        message = self.message
        tokens = len(message.prompt_token_ids) + len(self.emitted)
        is_short = tokens <= local_prefill_limit
        is_local = self.shares_prompt or is_short
        kind = RequestKind.COLOCATED if is_local else RequestKind.REMOTE_KV
        return EngineRequest(
            message.request_id,
            self.submitted_attempt,
            kind,
            tuple(message.prompt_token_ids),
            tuple(self.emitted),
            message.sampling,
            message.priority,
            self.deadline_s(),
            message.cache_salt,
            message.grammar,
            shares_prompt=self.shares_prompt and not is_short,
            accepted=self.taken or bool(self.emitted),
        )
