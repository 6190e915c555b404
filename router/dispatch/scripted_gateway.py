"""A gateway to workers that follow a script, inside the router's own process.

It stands beside the real links for tests, which need workers that refuse, fail, stall and die on demand, and
for measuring the router alone. The workers keep the protocol to the letter, and check that the router does:
a message that no router may send raises where it is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from antiphon.protocol.identity import Role, Topology, WorkerAddress
from antiphon.protocol.messages import (
    AbortRequest,
    Finish,
    FinishReason,
    GenerateRequest,
    KvTicket,
    LoadReport,
    Message,
    PrefillFailed,
    PrefillFinished,
    PrefillRequest,
    RequestRefused,
    Reserved,
    TokenBatch,
    TokenLogprobs,
    TokenOutput,
    TokensAck,
)
from antiphon.router.dispatch.gateway import (
    GatewayListener,
    WorkerBacklogged,
    WorkerMessage,
    WorkerUnreachable,
    may_wait,
)

Script = Callable[[GenerateRequest], list[int]]
"""The whole answer to a request, stop token included; a retry's emitted tokens are skipped."""


@dataclass(slots=True)
class ScriptedWorker:
    """One life of one worker and what it is told to do wrong.

    ``refuse`` and ``fail`` hold answers for the next requests, oldest first. With ``hold`` set, requests are
    kept until ``ScriptedGateway.go_on``.
    """

    address: WorkerAddress
    up: bool = True
    backlogged: bool = False
    """Whether new requests do not get through to it, other messages do."""
    draining: bool = False
    hold: bool = False
    refuse: list[RequestRefused] = field(default_factory=list)
    fail: list[str] = field(default_factory=list)
    ends: list[Finish] = field(default_factory=list)
    """How a decode worker ends the next requests before their first token, oldest first."""
    held: list[GenerateRequest | PrefillRequest] = field(default_factory=list)
    requests: dict[str, GenerateRequest] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)
    progress: dict[str, int] = field(default_factory=dict)
    """Output tokens of each request so far, those of earlier attempts included."""
    batches: int = 0
    acknowledged: int = 0


class ScriptedGateway:
    """``prefill`` and ``decode`` workers named p0, p1, ... and d0, d1, ...

    Attributes:
        script: what a request is answered with.
        step_s: pause between decode steps; 0 yields to the loop only.
        tokens_per_step: tokens of one request per step.
        cached_tokens: what prefill workers report as cached.
    """

    def __init__(self, script: Script, *, prefill: int = 1, decode: int = 1) -> None:
        self.script = script
        self.step_s = 0.0
        self.tokens_per_step = 1
        self.cached_tokens = 0
        self.workers: dict[str, ScriptedWorker] = {}
        self._listener: GatewayListener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        for role, prefix, count in ((Role.PREFILL, "p", prefill), (Role.DECODE, "d", decode)):
            for i in range(count):
                self._new_life(f"{prefix}{i}", role, epoch=1)

    # ----------------------------------------------------------------------------------------- the gateway

    async def start(self, listener: GatewayListener) -> None:
        """Bring all workers up."""
        self._listener = listener
        for worker in self.workers.values():
            listener.worker_up(worker.address)
        self.report()

    def set_topology(self, topology: Topology) -> None:
        """Scripted workers come and go by ``kill`` and ``revive``."""

    def send(self, worker_id: str, message: Message) -> None:
        """Take a message from the router."""
        worker = self.workers.get(worker_id)
        if worker is None or not worker.up:
            raise WorkerUnreachable(f"no link to worker {worker_id}")
        if worker.backlogged and may_wait(message):
            raise WorkerBacklogged(f"too much is on its way to worker {worker_id}")
        match message:
            case TokensAck():
                worker.acknowledged = message.sequence_number
            case GenerateRequest():
                self._take_generate(worker, message)
            case PrefillRequest():
                self._take_prefill(worker, message)
            case AbortRequest():
                worker.sent.append(message)
                worker.requests.pop(message.request_id, None)
                worker.held = [r for r in worker.held if r.request_id != message.request_id]
            case _:
                raise ValueError(f"a router never sends {type(message).__name__}")

    async def close(self) -> None:
        """Stop all workers."""
        self._listener = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------ for the test

    def report(self, **load: int) -> None:
        """Every worker sends a load report; ``load`` overrides its figures."""
        peers = {w.address.worker_id: w.address.epoch for w in self._of_role(Role.DECODE)}
        for worker in self.workers.values():
            if worker.up:
                figures = {
                    "running": len(worker.requests),
                    "waiting": 0,
                    "free_pages": 90,
                    "total_pages": 100,
                }
                figures |= {"queued_prefill_tokens": 0} | load
                is_prefill = worker.address.role is Role.PREFILL
                report = LoadReport(
                    epoch=worker.address.epoch,
                    running=figures["running"],
                    waiting=figures["waiting"],
                    free_pages=figures["free_pages"],
                    total_pages=figures["total_pages"],
                    queued_prefill_tokens=figures["queued_prefill_tokens"],
                    draining=worker.draining,
                    kv_peers=peers if is_prefill else {},
                )
                self._say(worker, report)

    def kill(self, worker_id: str, reason: str = "killed by the script") -> None:
        """End a worker's life; what it held is gone."""
        worker = self.workers[worker_id]
        worker.up = False
        worker.requests.clear()
        worker.held.clear()
        if self._listener is not None:
            self._listener.worker_down(worker_id, worker.address.epoch, reason)

    def revive(self, worker_id: str) -> None:
        """Start a worker's next life."""
        old = self.workers[worker_id]
        worker = self._new_life(worker_id, old.address.role, old.address.epoch + 1)
        if self._listener is not None:
            self._listener.worker_up(worker.address)
            self.report()

    def go_on(self, worker_id: str) -> None:
        """Stop holding, and run what was held."""
        worker = self.workers[worker_id]
        worker.hold = False
        held, worker.held = worker.held, []
        for message in held:
            self._run(worker, message)

    def say(self, worker_id: str, message: WorkerMessage) -> None:
        """A worker says something out of turn."""
        self._say(self.workers[worker_id], message)

    def emit(
        self, worker_id: str, request_id: str, attempt: int, position: int, token_ids: list[int], gap: int = 0
    ) -> None:
        """A decode worker sends tokens out of turn; ``gap`` batches before it are lost."""
        worker = self.workers[worker_id]
        worker.batches += gap
        if request_id in worker.requests:
            worker.progress[request_id] = max(worker.progress[request_id], position + len(token_ids))
        self._batch(worker, TokenOutput(request_id, attempt, position, token_ids))

    def kv_arrives(self, request: PrefillRequest) -> None:
        """All KV of a request is where it was to go, whatever its prefill worker has said so far."""
        decode = self.workers[request.ticket.decode_worker_id]
        if decode.address.epoch == request.ticket.decode_epoch:
            self._start_decoding(decode, request.request_id, request.attempt)

    def preempt(self, worker_id: str, request_id: str) -> None:
        """Decode gives up a request's pages, or its KV never came; it reserves them anew."""
        worker = self.workers[worker_id]
        request = worker.requests[request_id]
        emitted = worker.progress[request_id]
        known = len(request.prompt_token_ids) + emitted
        attempt = request.attempt + 1
        worker.requests[request_id] = GenerateRequest(
            request_id,
            attempt,
            request.prompt_token_ids,
            self.script(request)[:emitted],
            request.sampling,
        )
        ticket = self._ticket(worker, request_id, attempt, known - 1)
        self._say(worker, Reserved(request_id, attempt, 0, ticket, 0.001))

    # ------------------------------------------------------------------------------------------- the workers

    def _new_life(self, worker_id: str, role: Role, epoch: int) -> ScriptedWorker:
        address = WorkerAddress(worker_id, role, epoch, f"inproc://{worker_id}")
        self.workers[worker_id] = ScriptedWorker(address)
        return self.workers[worker_id]

    def _of_role(self, role: Role) -> list[ScriptedWorker]:
        return [w for w in self.workers.values() if w.address.role is role]

    def _take_generate(self, worker: ScriptedWorker, message: GenerateRequest) -> None:
        if worker.address.role is not Role.DECODE:
            raise ValueError(f"{worker.address.worker_id} decodes nothing")
        known = worker.requests.get(message.request_id)
        if known is not None and known.attempt >= message.attempt:
            raise ValueError(f"{message.request_id}: attempt {message.attempt} was sent twice")
        worker.sent.append(message)
        worker.requests[message.request_id] = message
        worker.progress[message.request_id] = len(message.output_token_ids)
        self._hold_or_run(worker, message)

    def _take_prefill(self, worker: ScriptedWorker, message: PrefillRequest) -> None:
        if worker.address.role is not Role.PREFILL:
            raise ValueError(f"{worker.address.worker_id} prefills nothing")
        if len(message.token_ids) - 1 != message.ticket.kv_tokens:
            raise ValueError(f"{len(message.token_ids)} tokens for a ticket of {message.ticket.kv_tokens}")
        worker.sent.append(message)
        self._hold_or_run(worker, message)

    def _hold_or_run(self, worker: ScriptedWorker, message: GenerateRequest | PrefillRequest) -> None:
        if worker.hold:
            worker.held.append(message)
        else:
            self._run(worker, message)

    def _run(self, worker: ScriptedWorker, message: GenerateRequest | PrefillRequest) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(message, GenerateRequest):
            loop.call_soon(self._reserve, worker, message)
        else:
            loop.call_soon(self._prefill, worker, message)

    def _reserve(self, worker: ScriptedWorker, request: GenerateRequest) -> None:
        if worker.requests.get(request.request_id) is not request:
            return
        if worker.refuse:
            refusal = worker.refuse.pop(0)
            del worker.requests[request.request_id]
            self._say(
                worker,
                RequestRefused(request.request_id, request.attempt, refusal.reason, refusal.retryable),
            )
            return
        kv_tokens = len(request.prompt_token_ids) + len(request.output_token_ids) - 1
        if request.fork_of in worker.requests:
            self._say(worker, Reserved(request.request_id, request.attempt, kv_tokens, None, 0.001, True))
            self._start_decoding(worker, request.request_id, request.attempt)
            return
        if kv_tokens == 0:
            self._say(worker, Reserved(request.request_id, request.attempt, 0, None, 0.001))
            self._start_decoding(worker, request.request_id, request.attempt)
            return
        ticket = self._ticket(worker, request.request_id, request.attempt, kv_tokens)
        self._say(worker, Reserved(request.request_id, request.attempt, 0, ticket, 0.001))

    def _ticket(self, worker: ScriptedWorker, request_id: str, attempt: int, kv_tokens: int) -> KvTicket:
        return KvTicket(
            decode_worker_id=worker.address.worker_id,
            decode_epoch=worker.address.epoch,
            request_id=request_id,
            attempt=attempt,
            kv_tokens=kv_tokens,
            skip_tokens=0,
            full_pages=[],
            sliding_pages=[],
            sliding_first_page=0,
        )

    def _prefill(self, worker: ScriptedWorker, request: PrefillRequest) -> None:
        if not worker.up:
            return
        if worker.refuse:
            refusal = worker.refuse.pop(0)
            self._say(
                worker,
                RequestRefused(request.request_id, request.attempt, refusal.reason, refusal.retryable),
            )
            return
        if worker.fail:
            stage = worker.fail.pop(0)
            self._say(worker, PrefillFailed(request.request_id, request.attempt, stage, "scripted"))
            return
        self._say(
            worker,
            PrefillFinished(
                request.request_id, request.attempt, self.cached_tokens, 0.001, 0.002, 0.003, 4096
            ),
        )
        self.kv_arrives(request)

    def _start_decoding(self, worker: ScriptedWorker, request_id: str, attempt: int) -> None:
        task = asyncio.get_running_loop().create_task(self._decode(worker, request_id, attempt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _decode(self, worker: ScriptedWorker, request_id: str, attempt: int) -> None:
        request = worker.requests.get(request_id)
        if request is None or request.attempt != attempt:
            return
        try:
            answer = self.script(request)
        except Exception as error:
            # A script with a bug is a worker with one: the request fails with it, instead of hanging.
            self._fail(worker, request, f"the script failed: {error!r}")
            return
        limit = min(len(answer), request.sampling.max_tokens)
        position = len(request.output_token_ids)
        while position < limit:
            await asyncio.sleep(self.step_s)
            if worker.requests.get(request_id) is not request:
                return
            if worker.fail:
                self._fail(worker, request, worker.fail.pop(0))
                return
            if worker.ends:
                self._end(worker, request, worker.ends.pop(0))
                return
            tokens = answer[position : min(position + self.tokens_per_step, limit)]
            worker.progress[request_id] = position + len(tokens)
            ends = position + len(tokens) == limit
            if ends:
                del worker.requests[request_id]
            self._batch(worker, self._output(request, position, tokens, len(answer) if ends else None))
            position += len(tokens)

    def _fail(self, worker: ScriptedWorker, request: GenerateRequest, error: str) -> None:
        self._end(worker, request, Finish(FinishReason.ERROR, error=error))

    def _end(self, worker: ScriptedWorker, request: GenerateRequest, finish: Finish) -> None:
        del worker.requests[request.request_id]
        position = worker.progress[request.request_id]
        self._batch(worker, TokenOutput(request.request_id, request.attempt, position, [], None, finish))

    def _output(
        self, request: GenerateRequest, position: int, tokens: list[int], answer_length: int | None
    ) -> TokenOutput:
        finish = None
        if answer_length is not None:
            whole = position + len(tokens) == answer_length
            reason = FinishReason.STOP if whole else FinishReason.LENGTH
            finish = Finish(reason, transfer_s=0.103, first_step_s=0.004, decode_s=0.005)
        logprobs = None
        if request.sampling.top_logprobs is not None:
            top = tuple((i, -1.0 - i) for i in range(request.sampling.top_logprobs))
            logprobs = [TokenLogprobs(-0.5, top) for _ in tokens]
        first_step_s = 0.004 if position == len(request.output_token_ids) else None
        return TokenOutput(
            request.request_id, request.attempt, position, tokens, logprobs, finish, first_step_s
        )

    def _batch(self, worker: ScriptedWorker, *outputs: TokenOutput) -> None:
        worker.batches += 1
        self._say(worker, TokenBatch(worker.address.epoch, worker.batches, list(outputs)))

    def _say(self, worker: ScriptedWorker, message: WorkerMessage) -> None:
        if worker.up and self._listener is not None:
            self._listener.worker_message(worker.address.worker_id, message)
