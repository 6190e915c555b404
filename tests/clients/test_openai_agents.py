"""openai-agents: an agent with a tool, over both APIs, whole and streamed, with its conversation going on."""

from __future__ import annotations

import openai
import pydantic
import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool

MODEL = "gpt-oss-tiny"
asked: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "minus 5"


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"])
async def agent(router, request):
    asked.clear()
    async with openai.AsyncOpenAI(base_url=router.url, api_key="none", max_retries=0) as client:
        model = request.param(model=MODEL, openai_client=client)
        yield Agent(name="Reporter", instructions="Tell the weather.", tools=[get_weather], model=model)


async def test_a_run_calls_the_tool_and_answers(agent, router):
    result = await Runner.run(agent, "How is the weather in Oslo?")
    assert asked == ["Oslo"]
    assert result.final_output == "It is cold in Oslo."
    assert "Tell the weather." in router.prompts[0]
    assert "functions.get_weather to=assistant<|channel|>commentary<|message|>minus 5" in router.prompts[1]
    usage = result.context_wrapper.usage
    assert usage.requests == 2
    assert usage.output_tokens > 10


async def test_a_streamed_run(agent):
    result = Runner.run_streamed(agent, "How is the weather in Oslo?")
    kinds = [event.type async for event in result.stream_events()]
    assert asked == ["Oslo"]
    assert result.final_output == "It is cold in Oslo."
    assert kinds.count("raw_response_event") > 10


async def test_a_conversation_goes_on(agent, router):
    first = await Runner.run(agent, "How is the weather in Oslo?")
    second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And now?"}])
    assert second.final_output == "It is cold in Oslo."
    assert asked == ["Oslo", "Oslo"]
    # The first turn has ended: its answer is shown again, its thoughts are not.
    turn = router.prompts[2]
    assert "<|channel|>final<|message|>It is cold in Oslo.<|end|>" in turn
    assert "<|channel|>analysis" not in turn


async def test_a_run_ends_in_a_type(agent):
    class Weather(pydantic.BaseModel):
        city: str
        degrees: int
        sky: str

    typed = agent.clone(output_type=Weather, tools=[])
    result = await Runner.run(typed, "How is the weather in Oslo?")
    assert result.final_output == Weather(city="Oslo", degrees=-5, sky="clear")
