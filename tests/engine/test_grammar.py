"""What a grammar lets an engine say: regions, their triggers and ends, in every way of running an engine."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from antiphon.engine.grammar import GrammarState, OutputGrammar, step_masks
from antiphon.engine.grammar_compiler import CompiledGrammar, GrammarCompiler, GrammarError
from antiphon.engine.loop import EngineLoop
from antiphon.engine.rejection import RequestRejected
from antiphon.engine.requests import RequestKind
from antiphon.protocol.grammar import (
    FreeText,
    GrammarRegion,
    GrammarSpec,
    JsonSchema,
    LarkGrammar,
    OneOfSequences,
)
from antiphon.protocol.messages import FinishReason

HEADER, TEXT, JSON, END, STOP = range(256, 261)
"""Markers of the tests' vocabulary, whose other tokens are bytes and some words."""
WORDS = (b"true", b'{"', b'":', b"12", b' "a', b'"}')
PIECES = [bytes([i]) for i in range(256)] + [b"<%d>" % i for i in range(5)] + list(WORDS)


def encode(text: str) -> list[int]:
    """Always the longest token that fits."""
    data, found = text.encode(), []
    while data:
        token = max(
            (t for t in range(len(PIECES)) if not 256 <= t < 261 and data.startswith(PIECES[t])),
            key=lambda t: len(PIECES[t]),
        )
        found.append(token)
        data = data[len(PIECES[token]) :]
    return found


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def spec(schema: Any = SCHEMA, **changes: Any) -> GrammarSpec:
    """A header, then any text or JSON; text leads to another header."""
    return GrammarSpec(
        regions=(
            GrammarRegion(((HEADER,),), OneOfSequences(((TEXT,), (JSON,), (ord("j"), JSON)))),
            GrammarRegion(((HEADER, TEXT),), FreeText(), (HEADER,)),
            GrammarRegion(((HEADER, JSON), (ord("j"), JSON)), JsonSchema(json.dumps(schema)), (STOP,)),
        ),
        **{"prefix_token_ids": (HEADER,), **changes},
    )


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(PIECES, range(256, 261), encode)


def allowed(compiler: GrammarCompiler, state: GrammarState) -> set[int]:
    """Tokens that may follow; every one when nothing is constrained."""
    grammar = OutputGrammar.__new__(OutputGrammar)
    grammar._state = state
    masks = step_masks([(0, grammar)])
    if masks is None:
        return set(range(len(PIECES)))
    if masks.errors:
        raise GrammarError(masks.errors[0])
    bits = np.unpackbits(masks.bits[0].view(np.uint8), bitorder="little")
    found = set(np.flatnonzero(bits).tolist())
    assert max(found) < len(PIECES)
    return found


def state_of(compiler: GrammarCompiler, grammar: GrammarSpec, *tokens: int) -> GrammarState:
    return GrammarState(compiler.compile(grammar).result(), tokens)


def test_headers_allow_their_sequences_only(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, spec())
    assert allowed(compiler, state) == {TEXT, JSON, ord("j")}
    state.advance(ord("j"))
    assert allowed(compiler, state) == {JSON}
    with pytest.raises(GrammarError, match="begins none"):
        state.advance(TEXT)


def test_text_is_free_until_its_end_opens_the_next_header(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, spec(), TEXT, *b"any", 261)
    assert allowed(compiler, state) == {*range(256), *range(261, len(PIECES)), HEADER}
    state.advance(HEADER)
    assert allowed(compiler, state) == {TEXT, JSON, ord("j")}


@pytest.mark.parametrize("start", [(JSON,), (ord("j"), JSON)], ids=["plain", "long header"])
def test_json_follows_its_schema_and_ends_where_it_is_complete(
    compiler: GrammarCompiler, start: tuple[int, ...]
) -> None:
    state = state_of(compiler, spec(), *start)
    assert STOP not in allowed(compiler, state)
    assert ord("{") in allowed(compiler, state)
    assert PIECES.index(b'{"') in allowed(compiler, state)
    for token in b'{"a":-12,"b":"yy"':
        assert token in allowed(compiler, state)
        assert STOP not in allowed(compiler, state)
        state.advance(token)
    state.advance(ord("}"))
    assert allowed(compiler, state) == {STOP}
    state.advance(STOP)
    assert not state.is_open


def test_a_number_may_go_on_or_end(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, spec({"type": "integer"}), JSON, *b"1")
    assert {STOP, ord("0"), PIECES.index(b"12")} <= allowed(compiler, state)
    with pytest.raises(GrammarError, match="not complete"):
        state_of(compiler, spec({"type": "integer"}), JSON, ord("-"), STOP)


def test_without_an_open_region_everything_may_be_said(compiler: GrammarCompiler) -> None:
    state = state_of(compiler, spec(prefix_token_ids=()), *b"anything")
    assert not state.is_open
    state.advance(HEADER)
    assert allowed(compiler, state) == {TEXT, JSON, ord("j")}


def test_the_longest_trigger_wins(compiler: GrammarCompiler) -> None:
    one, two = FreeText(), OneOfSequences(((END,),))
    grammar = GrammarSpec((GrammarRegion(((TEXT,),), one, (STOP,)), GrammarRegion(((HEADER, TEXT),), two)))
    assert STOP in allowed(compiler, state_of(compiler, grammar, ord("x"), TEXT))
    assert allowed(compiler, state_of(compiler, grammar, HEADER, TEXT)) == {END}


def test_lark(compiler: GrammarCompiler) -> None:
    grammar = GrammarSpec((GrammarRegion(((TEXT,),), LarkGrammar('start: "ab"+'), (STOP,)),))
    assert allowed(compiler, state_of(compiler, grammar, TEXT)) == {ord("a")}
    assert allowed(compiler, state_of(compiler, grammar, TEXT, *b"abab")) == {ord("a"), STOP}


@pytest.mark.parametrize(
    ("regions", "why"),
    [
        ((GrammarRegion((), FreeText(), (STOP,)),), "no trigger"),
        ((GrammarRegion(((),), FreeText(), (STOP,)),), "an empty one"),
        ((GrammarRegion(((1,),), FreeText()),), "cannot close"),
        ((GrammarRegion(((1,),), OneOfSequences(((2,), (2, 3)))),), "begins another"),
        ((GrammarRegion(((1,),), OneOfSequences(())),), "no sequence"),
        ((GrammarRegion(((1,),), OneOfSequences(((2,),)), (STOP,)),), "by itself"),
        ((GrammarRegion(((1,),), FreeText(), (STOP,)),) * 2, "another region"),
        ((GrammarRegion(((1,),), JsonSchema('{"type":"text"}'), (STOP,)),), "Invalid type"),
        ((GrammarRegion(((1,),), JsonSchema("nonsense"), (STOP,)),), "not JSON"),
        ((GrammarRegion(((1,),), LarkGrammar("nonsense"), (STOP,)),), "compiled"),
        ((GrammarRegion(((1,),), FreeText(), (len(PIECES),)),), "not below"),
    ],
)
def test_unusable_grammars(compiler: GrammarCompiler, regions: Any, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        compiler.compile(GrammarSpec(regions)).result()


# -------------------------------------------------------------------------------------------- in an engine


def engine(kit: Any, mode: str, compiler: GrammarCompiler, **changes: Any) -> EngineLoop:
    model = kit.FakeModel(replace(kit.fake_config(), vocab_size=len(PIECES)))
    settings = replace(kit.settings(**changes), vocab_size=len(PIECES))
    made: EngineLoop = kit.engine(mode, model, settings, grammars=compiler)
    return made


def run(kit: Any, mode: str, compiler: GrammarCompiler, *requests: Any, **changes: Any) -> Any:
    """What an engine of one mode says; its model knows nothing of grammars."""
    sizes = {"full_pages": 64, "sliding_pages": 64, **changes}
    settings = replace(kit.settings(**sizes), vocab_size=len(PIECES))
    loop = kit.engine(
        mode, kit.FakeModel(replace(kit.fake_config(), vocab_size=len(PIECES))), settings, grammars=compiler
    )
    for request in requests:
        loop.submit(request)
    said = kit.Transcript()
    drive(loop, said, {request.request_id for request in requests})
    loop.check_pages()
    return said


def drive(loop: EngineLoop, said: Any, names: set[str]) -> None:
    """Step until these requests have ended; a grammar may take a moment to be compiled."""
    for _ in range(2000):
        if names <= said.finished.keys() and not loop.has_work():
            return
        loop.wait_for_work(60.0)
        said.take(loop.step())
    raise AssertionError(f"still busy: {loop.snapshot()}")


def request(kit: Any, name: str, grammar: GrammarSpec | None, **more: Any) -> Any:
    more = {"max_tokens": 60, "stop_token_ids": (STOP,), "temperature": 1.0, **more}
    return replace(kit.request(name, kit.prompt_of(20), **more), grammar=grammar)


@pytest.fixture(params=["plain", "overlapped", "overlapped late", "graphs late"])
def mode(request: Any) -> str:
    return request.param


SHORT = GrammarSpec(
    (GrammarRegion(((HEADER,),), JsonSchema('{"enum":[[1,2],{"k":"word"},true,"x"]}'), (STOP,)),),
    (HEADER,),
)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}], ids=str)
def test_an_engine_says_what_the_grammar_allows(
    kit: Any, mode: str, compiler: GrammarCompiler, sampling: Any
) -> None:
    requests = [request(kit, f"g{i}", SHORT, seed=i, **sampling) for i in range(4)]
    said = run(kit, mode, compiler, *requests)
    for name in ("g0", "g1", "g2", "g3"):
        *text, stop = said.tokens[name]
        assert stop == STOP
        assert json.loads(b"".join(PIECES[t] for t in text)) in ([1, 2], {"k": "word"}, True, "x")
        assert said.finished[name].reason is FinishReason.STOP


def test_ways_to_run_agree_and_others_are_not_disturbed(
    kit: Any, mode: str, compiler: GrammarCompiler
) -> None:
    free = request(kit, "free", None, stop_token_ids=(), max_tokens=30)
    mixed = [request(kit, f"g{i}", spec(), seed=i, top_logprobs=2) for i in range(3)]
    said = run(kit, mode, compiler, *mixed, free)
    expected = run(kit, "plain", compiler, *mixed, free)
    assert said.tokens == expected.tokens
    assert said.tokens["free"] == run(kit, "plain", compiler, free).tokens["free"]
    assert {name: end.reason for name, end in said.finished.items()} == {
        name: end.reason for name, end in expected.finished.items()
    }


def test_an_output_goes_on_where_an_earlier_attempt_stopped(
    kit: Any, mode: str, compiler: GrammarCompiler
) -> None:
    whole = run(kit, mode, compiler, request(kit, "x", SHORT)).tokens["x"]
    for cut in range(1, len(whole)):
        again = replace(request(kit, "x", SHORT), output_token_ids=tuple(whole[:cut]), attempt=2)
        assert run(kit, mode, compiler, again).tokens["x"] == whole[cut:]


def test_preemption_keeps_the_place_in_the_grammar(kit: Any, mode: str, compiler: GrammarCompiler) -> None:
    endless = spec({"type": "array", "items": {"type": "integer"}, "minItems": 30})
    requests = [request(kit, f"g{i}", endless, seed=i, logit_bias=((TEXT, -100.0),)) for i in range(4)]
    calm = run(kit, mode, compiler, *requests)
    pressed = run(kit, mode, compiler, *requests, full_pages=14, sliding_pages=14)
    assert sum(end.preemptions for end in pressed.finished.values()) > 0
    assert pressed.tokens == calm.tokens


def test_an_output_that_does_not_fit_ends_alone(kit: Any, mode: str, compiler: GrammarCompiler) -> None:
    wrong = replace(request(kit, "wrong", SHORT), output_token_ids=(ord("?"),), attempt=2)
    said = run(kit, mode, compiler, wrong, request(kit, "right", SHORT))
    assert said.finished["wrong"].reason is FinishReason.GRAMMAR
    assert "does not fit the grammar" in said.finished["wrong"].error
    assert said.finished["right"].reason is FinishReason.STOP


def test_a_grammar_that_cannot_be_compiled_ends_its_request(
    kit: Any, mode: str, compiler: GrammarCompiler
) -> None:
    bad = GrammarSpec((GrammarRegion(((HEADER,),), JsonSchema('{"not":{}}'), (STOP,)),))
    said = run(kit, mode, compiler, request(kit, "x", bad))
    assert said.finished["x"].reason is FinishReason.GRAMMAR
    assert "not" in said.finished["x"].error
    assert "x" not in said.tokens


@pytest.mark.parametrize(
    ("changes", "grammar", "why"),
    [
        ({"min_tokens": 2}, SHORT, "min_tokens"),
        ({"ignore_eos": True}, SHORT, "ignore_eos"),
        ({}, GrammarSpec((GrammarRegion((), FreeText(), (1,)),)), "no trigger"),
    ],
)
def test_refusals(kit: Any, compiler: GrammarCompiler, changes: Any, grammar: Any, why: str) -> None:
    loop = engine(kit, "plain", compiler)
    with pytest.raises(RequestRejected, match=why):
        loop.submit(request(kit, "x", grammar, **changes))
    with pytest.raises(RequestRejected, match="no vocabulary"):
        kit.loop().submit(request(kit, "x", SHORT, stop_token_ids=()))
    prefill = kit.request("x", (1, 2), kind=RequestKind.PREFILL_ONLY)
    with pytest.raises(RequestRejected, match="samples nothing"):
        loop.submit(replace(prefill, grammar=SHORT))


class SlowCompiler(GrammarCompiler):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(PIECES, range(256, 261), encode)
        self.go = threading.Event()

    def compile(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Wait first."""

        def compile_later() -> CompiledGrammar:
            assert self.go.wait(120)
            return self._compile(spec)

        return self._pool.submit(compile_later)


@pytest.mark.parametrize("kind", [RequestKind.COLOCATED, RequestKind.REMOTE_KV], ids=str)
def test_nobody_waits_for_the_compiler_but_its_request(kit: Any, mode: str, kind: RequestKind) -> None:
    slow = SlowCompiler()
    loop = engine(kit, mode, slow)
    prompt = kit.prompt_of(20) if kind is RequestKind.COLOCATED else (7,)
    bound = kit.request("bound", prompt, kind=kind, max_tokens=60, stop_token_ids=(STOP,), temperature=1.0)
    loop.submit(replace(bound, grammar=SHORT))
    loop.submit(request(kit, "free", None, stop_token_ids=(), max_tokens=30))
    said = kit.Transcript()
    drive(loop, said, {"free"})
    assert "bound" not in said.tokens
    assert not loop.wait_for_work(0.01)
    slow.go.set()
    drive(loop, said, {"bound"})
    assert said.finished["bound"].reason is FinishReason.STOP
    loop.check_pages()


def test_an_end_before_the_compiler_is_done(kit: Any, mode: str) -> None:
    slow = SlowCompiler()
    loop = engine(kit, mode, slow)
    loop.submit(request(kit, "bound", SHORT))
    said = kit.Transcript()
    said.take(loop.step())
    loop.abort("bound", 1)
    drive(loop, said, {"bound"})
    slow.go.set()
    loop.wait_for_work(60.0)
    said.take(loop.step())
    assert said.finished["bound"].reason is FinishReason.ABORT
    loop.check_pages()
