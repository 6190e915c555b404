"""What the outside tells an engine: checks at the door, and commands in the order they were given."""

from __future__ import annotations

import struct
import threading
from array import array
from dataclasses import dataclass

from antiphon.engine.grammar import OutputGrammar
from antiphon.engine.rejection import RequestRejected
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.settings import EngineSettings
from antiphon.engine.token_array import bounds, token_array
from antiphon.protocol.grammar import GrammarSpec
from antiphon.protocol.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class Submit:
    """A request that passed the checks, with its time of arrival and its token ids."""

    request: EngineRequest
    arrival: int
    submitted_s: float
    token_ids: array[int]
    grammar: OutputGrammar | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """See ``EngineLoop.abort``."""

    request_id: str
    attempt_limit: int
    writer_granted: bool


@dataclass(frozen=True, slots=True)
class KvReady:
    """See ``EngineLoop.kv_ready``."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class KvLost:
    """See ``EngineLoop.kv_lost``."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Release:
    """See ``EngineLoop.release``."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ReleaseQuarantined:
    """See ``EngineLoop.release_quarantined``."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """The grammar of a request is ready, or will never be: its sequence may be planned."""

    request_id: str


Command = Submit | Abort | KvReady | KvLost | Release | ReleaseQuarantined | GrammarCompiled


def check_request(request: EngineRequest, settings: EngineSettings) -> array[int]:
    """Whether a request can ever run in an engine of these settings.

    Returns:
        The token ids of its prompt and output.

    Raises:
        RequestRejected: not retryable; says what is wrong.
    """
    tokens = len(request.prompt_token_ids) + len(request.output_token_ids)

    def reject(reason: str) -> None:
        raise RequestRejected(request.request_id, reason)

    if not request.prompt_token_ids:
        reject("the prompt is empty")
    try:
        token_ids = token_array(request.prompt_token_ids, request.output_token_ids)
    except struct.error as error:
        raise RequestRejected(request.request_id, "a token id is no whole number of 64 bits") from error
    for token in bounds(token_ids):
        if not 0 <= token < settings.vocab_size:
            reject(f"token id {token} is not within 0 .. {settings.vocab_size - 1}")
    # A sequence that samples needs room for one token more.
    longest = settings.max_sequence_tokens - (request.kind is not RequestKind.PREFILL_ONLY)
    if tokens > longest:
        bound = (
            f"the context limit of {settings.max_context_tokens} tokens"
            if settings.max_sequence_tokens == settings.max_context_tokens
            else f"the whole cache of {settings.full_pages} pages of {settings.page_size_tokens} tokens"
        )
        reject(f"{tokens} tokens do not fit into {bound} (at most {longest} can be taken)")
    if (request.kind is RequestKind.PREFILL_ONLY) != (request.sampling is None):
        reject(f"a {request.kind} request {'has no' if request.sampling else 'needs'} sampling parameters")
    if request.sampling is not None:
        problem = _sampling_problem(request.sampling, len(request.output_token_ids), settings.vocab_size)
        if problem:
            reject(problem)
    if request.grammar is not None:
        problem = _grammar_problem(request.grammar, request.sampling)
        if problem:
            reject(problem)
    return token_ids


def _sampling_problem(params: SamplingParams, emitted: int, vocabulary: int) -> str | None:
    if params.max_tokens <= emitted:
        return f"max_tokens {params.max_tokens} with {emitted} tokens already emitted"
    if not 0 <= params.temperature < float("inf"):
        return f"temperature {params.temperature} is not 0 or more"
    if not 0 < params.top_p <= 1:
        return f"top_p {params.top_p} is not within (0, 1]"
    if params.top_k < 0:
        return f"top_k {params.top_k} is negative"
    if not 0 <= params.min_p <= 1:
        return f"min_p {params.min_p} is not within [0, 1]"
    ids = (*params.stop_token_ids, *(token for token, _ in params.logit_bias))
    if not all(0 <= token < vocabulary for token in ids):
        return f"a stop id or biased id is not below {vocabulary}"
    if params.top_logprobs is not None and not 0 <= params.top_logprobs <= vocabulary:
        return "top_logprobs is out of range"
    return None


def _grammar_problem(grammar: GrammarSpec, params: SamplingParams | None) -> str | None:
    if params is None:
        return "a request that samples nothing has a grammar"
    if params.ignore_eos or params.min_tokens:
        return "ignore_eos and min_tokens contradict a grammar, which says where the output ends"
    return grammar.problem()


class Inbox:
    """Commands on their way to the engine thread, and who is live as those who gave them see it.

    An id is live from its ``submit`` to the command or event that ends it, so that "abort, then submit again"
    works without waiting for the engine to see the abort.
    """

    def __init__(self, max_queued_requests: int) -> None:
        self._max_queued = max_queued_requests
        self._changed = threading.Condition(threading.RLock())
        self._commands: list[Command] = []
        self._live: dict[str, int] = {}
        self._fenced: dict[str, set[int]] = {}
        self._queued = 0
        self._arrivals = 0

    def submit(
        self,
        request: EngineRequest,
        token_ids: array[int],
        now_s: float,
        grammar: OutputGrammar | None = None,
    ) -> None:
        """Append a checked request and its token ids.

        Raises:
            RequestRejected: its id is live, or the queue is full (retryable) and it is new.
        """
        with self._changed:
            if request.request_id in self._live:
                attempt = self._live[request.request_id]
                raise RequestRejected(request.request_id, f"attempt {attempt} of it is still running")
            if self.is_fenced(request.request_id, request.attempt):
                reason = f"attempt {request.attempt} is not newer than a quarantined one"
                raise RequestRejected(request.request_id, reason)
            if self._queued >= self._max_queued and not request.accepted:
                reason = f"the queue is full ({self._max_queued} requests)"
                raise RequestRejected(request.request_id, reason, retryable=True)
            self._live[request.request_id] = request.attempt
            self._queued += 1
            self._arrivals += 1
            self._append(Submit(request, self._arrivals, now_s, token_ids, grammar))

    def give(
        self, command: Abort | KvReady | KvLost | Release | ReleaseQuarantined | GrammarCompiled
    ) -> None:
        """Append any other command."""
        with self._changed:
            live = self._live.get(command.request_id)
            ends = (isinstance(command, Abort) and live is not None and live <= command.attempt_limit) or (
                isinstance(command, Release) and live == command.attempt
            )
            if ends:
                del self._live[command.request_id]
            self._append(command)

    def take(self) -> list[Command]:
        """All commands so far, in order."""
        with self._changed:
            commands, self._commands = self._commands, []
            return commands

    def ended(self, request_id: str, attempt: int) -> None:
        """The engine ended this submission by itself."""
        with self._changed:
            if self._live.get(request_id) == attempt:
                del self._live[request_id]

    def fence(self, request_id: str, attempt: int) -> None:
        """Pages of this attempt are quarantined under its name: only later attempts may be submitted."""
        with self._changed:
            self._fenced.setdefault(request_id, set()).add(attempt)

    def unfence(self, request_id: str, attempt: int) -> None:
        """The quarantine of this attempt is over."""
        with self._changed:
            attempts = self._fenced.get(request_id, set())
            attempts.discard(attempt)
            if not attempts:
                self._fenced.pop(request_id, None)

    def is_fenced(self, request_id: str, attempt: int) -> bool:
        """Whether this or a later attempt of the request is quarantined."""
        with self._changed:
            return any(attempt <= fenced for fenced in self._fenced.get(request_id, ()))

    def set_waiting(self, waiting: int) -> None:
        """The engine's queue has this length now; submissions not yet taken come on top."""
        with self._changed:
            self._queued = waiting + sum(isinstance(command, Submit) for command in self._commands)

    @property
    def queued(self) -> int:
        """Requests without pages, those not yet taken included."""
        with self._changed:
            return self._queued

    def __bool__(self) -> bool:
        with self._changed:
            return bool(self._commands)

    def wait(self, timeout_s: float) -> None:
        """Block until there is a command, or the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._commands), timeout_s)

    def _append(self, command: Command) -> None:
        self._commands.append(command)
        self._changed.notify_all()
