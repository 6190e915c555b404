"""Two engines that exchange KV."""

from __future__ import annotations

from fake_engines import Transcript, make_engine, make_request
from fake_model import PAGE, FakeModel

from antiphon.engine.events import (
    KvWritten,
    PagesReserved,
    PrefillComputed,
    TokensSampled,
)
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.settings import EngineSettings
from antiphon.model.forward import LanguageModel


class SplitPair:
    """A prefill engine and a decode engine, joined by copying pages as a transport would."""

    def __init__(
        self,
        prefill: EngineSettings,
        decode: EngineSettings,
        prefill_model: LanguageModel | None = None,
        decode_model: LanguageModel | None = None,
        mode: str = "plain",
    ) -> None:
        self.prefill = make_engine(mode, prefill_model or FakeModel(), prefill, on_kv_written=self.ship)
        self.decode = make_engine(mode, decode_model or FakeModel(), decode)
        self.requests: dict[str, EngineRequest] = {}
        self.emitted: dict[str, list[int]] = {}
        self.wanted: dict[tuple[str, int], PagesReserved] = {}
        self.shipped: dict[tuple[str, int], set[tuple[int, int]]] = {}
        self.transcript = Transcript()

    def submit(self, request: EngineRequest) -> None:
        """Hand a REMOTE_KV request to the decode engine."""
        self.requests[request.request_id] = request
        self.emitted[request.request_id] = list(request.output_token_ids)
        self.decode.submit(request)

    def ship(self, event: KvWritten) -> None:
        """Copy the layers of one layer group of the pages that the decode side wants."""
        wanted = self.wanted.get((event.request_id, event.attempt))
        if wanted is None:
            return
        offset = wanted.cached_tokens // PAGE
        groups = self.prefill.settings.layer_groups
        for group, pairs, first, pages in (
            ("full", event.full_pages, offset, wanted.full_pages),
            ("sliding", event.sliding_pages, wanted.sliding_first_page, wanted.sliding_pages),
        ):
            source, target = self.prefill.kv_cache.memory(group), self.decode.kv_cache.memory(group)
            layers = source.shape[1]
            some = slice(event.layer_group * layers // groups, (event.layer_group + 1) * layers // groups)
            for logical, physical in pairs:
                if logical >= first:
                    target[pages[logical - first], some] = source[physical, some]
        self.shipped.setdefault((event.request_id, event.attempt), set()).add(
            (event.chunk, event.layer_group)
        )

    def turn(self) -> None:
        """One step of each engine, and what their owners do with the events."""
        for event in self.decode.step():
            self.transcript.take([event])
            if isinstance(event, TokensSampled):
                self.emitted[event.request_id] += event.token_ids
            if isinstance(event, PagesReserved) and event.kv_tokens > event.cached_tokens:
                self.reserved(event)
        for event in self.prefill.step():
            if isinstance(event, PrefillComputed):
                self.prefill.release(event.request_id, event.attempt)
                self.decode.kv_ready(event.request_id, event.attempt)

    def reserved(self, event: PagesReserved) -> None:
        """Ask the prefill engine for what is missing."""
        request = self.requests[event.request_id]
        tokens = (*request.prompt_token_ids, *self.emitted[event.request_id])
        assert event.kv_tokens == len(tokens) - 1
        self.wanted[event.request_id, event.attempt] = event
        self.prefill.submit(
            make_request(event.request_id, tokens, kind=RequestKind.PREFILL_ONLY, attempt=event.attempt)
        )

    def run(self, limit: int = 2000) -> Transcript:
        """Turn until both engines rest."""
        for _ in range(limit):
            if not (self.decode.has_work() or self.prefill.has_work()):
                return self.transcript
            self.turn()
        raise AssertionError(f"still busy: {self.decode.snapshot()}")
