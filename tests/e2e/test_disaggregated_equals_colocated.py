"""The same greedy tokens whatever computes them: transformers, one engine, or workers that hand KV over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from faulty_actors import FaultyDecodeActor, FaultyPrefillActor
from greedy_reference import Case, Reference, make_cases
from token_client import Answer, running_workers

from antiphon.cluster.ray_cluster import ACTOR_KINDS
from antiphon.configs.schema import DeploymentConfig
from antiphon.configs.workers import KvCacheConfig
from antiphon.engine.events import SequenceFinished, TokensSampled
from antiphon.engine.loop import EngineLoop
from antiphon.engine.requests import EngineRequest, RequestKind
from antiphon.engine.settings import EngineSettings
from antiphon.model.checkpoint.load import load_model
from antiphon.protocol.identity import Role
from antiphon.protocol.messages import FinishReason

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a crowded machine starts processes slowly

LENGTHS = (1, 2, 63, 64, 65, 100, 127, 128, 129, 130, 192, 255, 300, 384, 513, 1000)
"""Both sides of every page, chunk and window boundary; 100 crosses position 128 while it decodes."""
MOST_CROWDS = 4
"""So often all are asked for at once until decoding has run out of pages."""
TIED_SHARE = 0.001
"""Of all requests, at most this share may differ by a tie."""

CASES = make_cases(LENGTHS, max_tokens=32)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def assert_equal_to_reference(reference: Reference, outputs: dict[Case, list[int]]) -> None:
    """Every output is the reference's greedy continuation, by the rule of ties."""
    assert [len(case.prompt) for case in outputs] == list(LENGTHS)
    tied = [case for case, output in outputs.items() if reference.judge(case, output)]
    assert len(tied) <= TIED_SHARE * len(outputs), [len(case.prompt) for case in tied]


def run_colocated(checkpoint: Path, config: DeploymentConfig) -> dict[Case, list[int]]:
    """All cases at once through one engine that does both parts."""
    model = load_model(checkpoint, torch.float32)
    settings = EngineSettings.resolve(config.decode, model.config)
    engine = EngineLoop(model, settings, full_fp8=config.model.fp8_kv)
    outputs: dict[str, list[int]] = {}
    for index, case in enumerate(CASES):
        outputs[str(index)] = []
        engine.submit(
            EngineRequest(str(index), 1, RequestKind.COLOCATED, case.prompt, sampling=case.sampling)
        )
    finished = 0
    while finished < len(CASES):
        for event in engine.step():
            if isinstance(event, TokensSampled):
                outputs[event.request_id] += event.token_ids
            elif isinstance(event, SequenceFinished):
                assert event.reason is FinishReason.LENGTH, event.error
                finished += 1
    return {case: outputs[str(index)] for index, case in enumerate(CASES)}


def test_one_engine_equals_transformers(
    checkpoint: Path, local_deployment: DeploymentConfig, reference: Reference
) -> None:
    assert_equal_to_reference(reference, run_colocated(checkpoint, local_deployment))


async def test_prefill_and_decode_in_two_processes_equal_transformers(
    local_deployment: DeploymentConfig, reference: Reference
) -> None:
    async with running_workers(local_deployment) as workers:
        outputs = {}
        for case in CASES:  # one at a time: nothing but the hand-over between the two
            answer = await workers.answer(case)
            assert answer.attempts == 1
            outputs[case] = answer.token_ids
        await workers.idle()
    assert_equal_to_reference(reference, outputs)


async def test_workers_with_fp8_pages_say_what_one_engine_with_such_pages_says(
    checkpoint: Path, local_deployment: DeploymentConfig
) -> None:
    """Sums of another order may round a number otherwise, and a near tie may then fall to the other side."""
    model = local_deployment.model.model_copy(update={"kv_dtype": "fp8_e4m3"})
    config = local_deployment.model_copy(update={"model": model})
    expected = run_colocated(checkpoint, config)
    async with running_workers(config) as workers:
        answers = await asyncio.gather(*(workers.answer(case) for case in CASES))
        await workers.idle()
    same = [answer.token_ids == expected[case] for case, answer in zip(CASES, answers, strict=True)]
    assert sum(same) >= 0.75 * len(same)


async def test_all_at_once_with_preemption_chunks_and_a_lost_transfer_equal_transformers(
    local_deployment: DeploymentConfig, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    faults = Path(__file__).parent / ".faults.log"
    faults.unlink(missing_ok=True)
    # Pages for about a third of what the requests come to, and headroom for a third of an answer: decoding
    # runs out of pages again and again.
    decode = local_deployment.decode.model_copy(
        update={"kv_cache": KvCacheConfig(full_pages=80, sliding_pages=96, page_size_tokens=16)}
    )
    prefill = local_deployment.prefill.model_copy(
        update={
            "kv_cache": KvCacheConfig(full_pages=256, sliding_pages=128, page_size_tokens=16),
            "chunk_tokens": 64,
        }
    )
    transfer = local_deployment.transfer.model_copy(update={"completion_timeout_s": 1.0})
    # Besides the fault, every preemption and every stop of a process for a second may take an attempt.
    router = local_deployment.router.model_copy(update={"max_attempts": 30})
    config = local_deployment.model_copy(
        update={"router": router, "decode": decode, "prefill": prefill, "transfer": transfer}
    )
    kinds = {**ACTOR_KINDS, Role.PREFILL: FaultyPrefillActor, Role.DECODE: FaultyDecodeActor}
    rounds: list[dict[Case, Answer]] = []
    async with running_workers(config, kinds) as workers:
        # The faults may hold requests up so that they decode one after the other, and none needs another's
        # pages: the next crowd has no faults before it.
        while len(rounds) < MOST_CROWDS and not workers.retries(Role.DECODE, "preempted"):
            cases = make_cases(LENGTHS, max_tokens=48, seed=len(rounds))
            answers = await asyncio.gather(*(workers.answer(case) for case in cases))
            rounds.append(dict(zip(cases, answers, strict=True)))
            await workers.idle()
        preemptions = workers.retries(Role.DECODE, "preempted")
    assert sorted(faults.read_text().split("\n")) == ["", "notification lost", "write failed"]
    assert max(answer.attempts for answer in rounds[0].values()) > 1
    assert preemptions > 0
    for crowd in rounds:
        assert_equal_to_reference(reference, {case: answer.token_ids for case, answer in crowd.items()})
    faults.unlink()


def test_the_judge_sees_one_wrong_token(reference: Reference) -> None:
    case = Case(CASES[5].prompt, max_tokens=2)
    right = int(reference.next_logits(case.prompt).argmax())
    second = int(reference.next_logits((*case.prompt, right)).argmax())
    assert reference.judge(case, [right, second]) == 0
    with pytest.raises(AssertionError, match=r"short|not of the tie"):
        reference.judge(case, [right, (second + 1) % 1000])
