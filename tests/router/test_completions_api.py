"""Text completions, and the tokenizer endpoints."""

from __future__ import annotations

import json

import pytest

from antiphon.router.byte_format import CONTENT, REASONING, STOP, ByteFormatter
from antiphon.router.dispatch.scripted_gateway import ScriptedGateway
from antiphon.router.harmony.formatter import HarmonyFormatter


def saying(text: str) -> ScriptedGateway:
    return ScriptedGateway(lambda _: [*text.encode(), STOP])


async def complete(deployment, **fields):
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 100, **fields}
    return await deployment.http.post("/v1/completions", json=body)


async def test_sdk_reads_and_streams(deploy):
    deployment = await deploy(saying(" upon 👍"))
    completion = await deployment.openai.completions.create(model="tiny", prompt="Once", max_tokens=100)
    assert completion.choices[0].text == " upon 👍"
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].logprobs is None
    assert completion.usage.prompt_tokens == 4
    assert completion.usage.completion_tokens == len(" upon 👍".encode()) + 1
    stream = await deployment.openai.completions.create(
        model="tiny",
        prompt="Once",
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == " upon 👍"
    assert chunks[-1].usage == completion.usage
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert len({chunk.id for chunk in chunks}) == 1


async def test_sixteen_tokens_unless_asked_otherwise(deploy):
    deployment = await deploy(saying("x" * 50))
    document = (await complete(deployment, max_tokens=None)).json()
    assert document["choices"][0]["text"] == "x" * 16
    assert document["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("ab", [[97, 98]]),
        ([97, 256], [[97, 256]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
async def test_forms_of_a_prompt(deploy, prompt, sent):
    deployment = await deploy(ScriptedGateway(lambda r: [r.prompt_token_ids[0], STOP]))
    document = (await complete(deployment, prompt=prompt, n=2)).json()
    requests = deployment.workers.workers["d0"].sent
    assert [message.prompt_token_ids for message in requests] == [p for p in sent for _ in range(2)]
    assert [choice["index"] for choice in document["choices"]] == list(range(2 * len(sent)))
    assert [choice["text"] for choice in document["choices"]] == [chr(p[0]) for p in sent for _ in range(2)]
    assert document["usage"]["prompt_tokens"] == sum(map(len, sent))


async def test_echo(deploy):
    deployment = await deploy(saying(" upon"))
    assert (await complete(deployment, echo=True)).json()["choices"][0]["text"] == "Once upon"
    events = (await complete(deployment, echo=True, stream=True)).text.split("\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Once upon"
    assert chunks[0]["choices"][0]["text"] == "Once"


async def test_stop_text(deploy):
    deployment = await deploy(saying("a END b"))
    document = (await complete(deployment, stop="END", logprobs=0)).json()
    assert document["choices"][0]["text"] == "a "
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["choices"][0]["logprobs"]["tokens"] == ["a", " "]


async def test_logprobs(deploy):
    deployment = await deploy(saying("aé"))
    logprobs = (await complete(deployment, logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 1]
    assert logprobs["top_logprobs"][0] == {"\x00": -1.0, "\x01": -2.0}


TELLING = (
    # text, stop text, what is shown, the tokens whose log-probabilities are told
    ("a END b", "END", "a ", ["a", " "]),
    ("aEENDb", "END", "aE", ["a", "E"]),
    ("aé👍b", "👍", "aé", ["a", "bytes:\\xc3", "bytes:\\xa9"]),
    ("aEN", "END", "aEN", ["a", "E", "N"]),
    ("END", "END", "", []),
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 100])
@pytest.mark.parametrize(("text", "stop", "shown", "tokens"), TELLING)
async def test_logprobs_are_those_of_the_text_before_a_stop_text(
    deploy, text, stop, shown, tokens, tokens_per_step, stream
):
    """However many tokens come at one time: which those are is a matter of load."""
    workers = saying(text)
    workers.tokens_per_step = tokens_per_step
    answer = await complete(await deploy(workers), stop=stop, logprobs=1, stream=stream)
    if stream:
        chunks = [json.loads(event[6:]) for event in answer.text.split("\n\n") if event.startswith("data: {")]
    else:
        chunks = [answer.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == shown
    told = [choice["logprobs"] for choice in choices]
    assert [token for one in told for token in one["tokens"]] == tokens
    assert all(len(one["tokens"]) == len(values) for one in told for values in one.values())


async def test_a_token_that_ends_in_a_stop_text_is_told_with_what_it_shows(deploy):
    vocabulary = HarmonyFormatter()
    workers = ScriptedGateway(lambda _: vocabulary.encode("Hello there, hello."))
    for workers.tokens_per_step in (1, 100):
        answer = await complete(await deploy(workers, formatter=vocabulary), stop="re", logprobs=0)
        (choice,) = answer.json()["choices"]
        assert choice["text"] == "Hello the"
        assert choice["logprobs"]["tokens"] == ["Hello", " there"]


async def test_markers_are_hidden_unless_asked_for(deploy):
    deployment = await deploy(ScriptedGateway(lambda _: [REASONING, 97, CONTENT, 98, STOP]))
    assert (await complete(deployment)).json()["choices"][0]["text"] == "ab"
    shown = await complete(deployment, skip_special_tokens=False)
    assert shown.json()["choices"][0]["text"] == "<|reasoning|>a<|content|>b"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [261]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"prompt": "x" * 512}, "prompt"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 6}, "logprobs"),
        ({"messages": []}, "messages"),
    ],
)
async def test_bad_requests_name_the_field(deploy, fields, param):
    deployment = await deploy()
    response = await complete(deployment, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_too_many_prompts_are_not_encoded(deploy, monkeypatch):
    """Millions fit into a body, and take half a minute."""
    deployment = await deploy(saying("x"), encoding_processes=0)
    encoded = []
    encode = ByteFormatter.encode
    monkeypatch.setattr(
        ByteFormatter, "encode", lambda self, text: encoded.append(text) or encode(self, text)
    )
    for count, status in ((129, 400), (2, 200)):
        encoded.clear()
        response = await complete(deployment, prompt=["ab"] * count)
        assert response.status_code == status, response.text
        assert len(encoded) == (count if status == 200 else 0)


async def test_tokenize_and_back(deploy):
    deployment = await deploy()
    document = (await deployment.http.post("/tokenize", json={"prompt": "hé"})).json()
    assert document == {"count": 3, "max_model_len": 512, "tokens": list("hé".encode())}
    back = await deployment.http.post("/detokenize", json={"tokens": [*document["tokens"], 256]})
    assert back.json() == {"prompt": "hé<|reasoning|>"}


async def test_tokenize_a_conversation_is_what_the_worker_gets(deploy):
    deployment = await deploy()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    tokens = (await deployment.http.post("/tokenize", json=body)).json()["tokens"]
    await deployment.chat()
    assert deployment.workers.workers["d0"].sent[0].prompt_token_ids == tokens


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404),
        ("/detokenize", {"tokens": [261]}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
    ],
)
async def test_bad_tokenizer_requests(deploy, path, body, status):
    deployment = await deploy()
    response = await deployment.http.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["message"]
