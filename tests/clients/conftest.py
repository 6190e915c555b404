"""A running router for unmodified clients; scripted workers stand in for a model that can use a tool."""

from __future__ import annotations

import asyncio
import datetime
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from antiphon.configs.schema import DeploymentConfig
from antiphon.engine.grammar import GrammarState
from antiphon.engine.grammar_compiler import GrammarCompiler
from antiphon.protocol.messages import GenerateRequest
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.harmony.formatter import HarmonyFormatter
from antiphon.router.harmony.markers import FIRST_SPECIAL
from antiphon.router.served_model import ServedModel
from antiphon.router.server import RouterServer

# Read when these libraries are imported: no price list, no traces, from or to anywhere.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["LANGSMITH_TRACING"] = "false"

MODEL = "gpt-oss-tiny"
MAX_CONTEXT_TOKENS = 4096
HERE = Path(__file__).parent
THOUGHT = "The user wants the weather."
PLAIN = "Hello 👋 there."
THINK = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
PLAIN_ANSWER = f"{THINK.format('They greet.')}<|channel|>final<|message|>{PLAIN}<|return|>"
CALL = (
    THINK.format(THOUGHT) + "<|channel|>commentary to=functions.get_weather <|constrain|>json"
    '<|message|>{"city":"Oslo"}<|call|>'
)
RUN = (
    THINK.format("I run it.") + "<|channel|>commentary to=functions.run_python <|constrain|>json"
    '<|message|>{"input":"print(\\"sung ☃\\")\\n"}<|call|>'
)
ANSWER_AFTER_RUN = "<|channel|>final<|message|>It ran.<|return|>"
ANSWER_AFTER_CALL = "<|channel|>final<|message|>It is cold in Oslo.<|return|>"


ANSWERS = {
    "namespace functions {\n\n// The weather in a city.\ntype GetWeather": (
        '<|channel|>commentary to=functions.GetWeather json<|message|>{"city":"Oslo"}<|call|>'
    ),
    "# Response Formats": (
        f"{THINK.format('JSON, then.')}<|channel|>final <|constrain|>json<|message|>"
        '{"city": "Oslo", "degrees": -5, "sky": "clear"}<|return|>'
    ),
}
"""What stands in a prompt, and what a model would write then."""


def answer_to(prompt: str) -> str:
    """What a model would write after this prompt."""
    for sign, answer in ANSWERS.items():
        if sign in prompt:
            return answer
    last = prompt.removesuffix("<|start|>assistant").rsplit("<|start|>", 1)[-1]
    if last.startswith("functions.get_weather to=assistant"):
        return ANSWER_AFTER_CALL
    if last.startswith("functions.run_python to=assistant"):
        return ANSWER_AFTER_RUN
    if "type run_python" in prompt:
        return RUN
    return CALL if "type get_weather" in prompt else PLAIN_ANSWER


class RunningRouter:
    """A router on a thread of its own, as clients may be synchronous.

    ``answer`` maps a prompt's text to what the model writes; ``prompts`` are what it was asked.
    """

    def __init__(
        self, answer: Callable[[str], str] = answer_to, max_context_tokens: int = MAX_CONTEXT_TOKENS
    ) -> None:
        self._answer = answer
        self._max_context_tokens = max_context_tokens
        self.formatter = HarmonyFormatter(current_date=datetime.date(2025, 6, 28).isoformat)
        vocabulary = self.formatter.vocabulary
        self._grammars = GrammarCompiler(
            vocabulary.pieces, range(FIRST_SPECIAL, vocabulary.size), vocabulary.encode
        )
        self.prompts: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="router")
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        self.url = f"{self._server.url}/v1"

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(drain=False), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _start(self) -> RouterServer:
        config = DeploymentConfig.model_validate({"model": {"path": MODEL}, "router": {"port": 0}})
        model = ServedModel(MODEL, self._max_context_tokens, created=1_700_000_000, fingerprint="fp_test")
        server = RouterServer(config, model, self.formatter, ScriptedGateway(self._script))
        await server.start()
        return server

    def _script(self, request: GenerateRequest) -> list[int]:
        prompt = self.formatter.vocabulary.decode(request.prompt_token_ids)
        self.prompts.append(prompt)
        answer = self.formatter.vocabulary.encode_marked(self._answer(prompt))
        if request.grammar is not None:
            # A decode worker would let the model say nothing else; this raises if the answer is not allowed.
            GrammarState(self._grammars.compile(request.grammar).result(), answer)
        return answer


@pytest.fixture(scope="session")
def running_router() -> Iterator[RunningRouter]:
    router = RunningRouter()
    yield router
    router.stop()


@pytest.fixture
def router(running_router: RunningRouter) -> RunningRouter:
    running_router.prompts.clear()
    return running_router


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What these libraries warn of is between them and what they depend on."""
    for item in items:
        if HERE in item.path.parents:
            for category in (
                "DeprecationWarning",
                "PendingDeprecationWarning",
                "ResourceWarning",
                "UserWarning",
            ):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}"))
