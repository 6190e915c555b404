"""A comparison goes on only with runs that were measured as it would measure them now."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from antiphon.benchmarks.split import command, identity
from antiphon.benchmarks.split.arrangements import Arrangement, colocated_of, split_of
from antiphon.benchmarks.split.identity import configured
from antiphon.benchmarks.split.ladder import Ladder
from antiphon.benchmarks.split.loads import FixedLoads
from antiphon.benchmarks.split.mixes import Mix
from antiphon.benchmarks.split.observed import LoadRun, load_runs
from antiphon.benchmarks.split.run import DRAIN_S, HttpLoad, MeasuredOtherwise, run_comparison
from antiphon.configs.schema import DeploymentConfig


def deployment(decode: Mapping[str, object], router: Mapping[str, object]) -> DeploymentConfig:
    return DeploymentConfig.model_validate(
        {
            "model": {"path": "somewhere/gpt-oss-20b"},
            "prefill": {"device": "cuda", "chunk_tokens": 8192},
            "decode": {"device": "cuda", **decode},
            "router": router,
        }
    )


class QuickLoad(HttpLoad):
    """Measures nothing: every load holds."""

    async def __call__(self, url: str, arrangement: Arrangement, mix: Mix, rate_per_s: float) -> LoadRun:
        ladder = self.ladders_of(arrangement, mix)[0]
        return LoadRun(
            *(arrangement.name, arrangement.chunk_tokens, self.model, self.device, arrangement.gpus),
            *(mix.name, mix.input_tokens, mix.output_tokens, rate_per_s, ladder.duration_s, 1.0),
            requests=1,
            failed=0,
            ttft_ms=[1.0],
            itl_p99_ms=[1.0],
            ttft_p50_p99_ms=None,
            itl_p50_p99_ms=None,
            output_tokens_per_s=1.0,
            peer=False,
            commit="c",
            date="d",
            standing=self.standing_of(arrangement, mix, rate_per_s),
            settings=self.settings(arrangement, mix),
        )

    async def warm(self, url: str, mix: Mix) -> None: ...


class Comparison:
    """Of one deployment, under one mix."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.measured: list[float] = []

    async def run(
        self, *, again: bool = False, end_after: int | None = None, standing: int = 0, **changed: Any
    ) -> None:
        """Measure what is missing, with some settings changed; ``end_after`` so many runs break it off."""
        first, step, highest = changed.get("rates", (10.0, 2.0, 20.0))
        times = changed.get("duration_s", 60.0), changed.get("warmup_s", 10.0)
        ladder = Ladder(first, step, highest, *times, 1000.0, 25.0, 0.9, refine=0)
        drain_s, seed = changed.get("drain_s", DRAIN_S), changed.get("seed", 0)
        config = deployment(changed.get("decode", {}), changed.get("router", {}))
        load = QuickLoad(
            *(FixedLoads(ladder, {}).ladders, "CPU", config.model.name, seed, drain_s),
            lambda arrangement, mix, rate: standing,
        )
        asked = [] if "chunk" in changed else [split_of(config)]
        asked += [colocated_of(config, changed[key]) for key in ("chunk", "beside_chunk") if key in changed]
        self.measured.clear()

        def note(run: LoadRun, known: bool) -> None:
            self.measured.extend([] if known else [run.rate_per_s])
            if len(self.measured) == end_after:
                raise KeyboardInterrupt

        @asynccontextmanager
        async def start(arrangement: Arrangement) -> AsyncIterator[str]:
            yield "http://nowhere"

        mix = Mix("tiny", 5, changed.get("output_tokens", 4))
        await run_comparison(asked, [mix], load, self.output, again=again, on_run=note, start=start)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"warmup_s": 9.5}, "warmup_s 10.0 there, 9.5 now"),
        ({"duration_s": 70.0}, "duration_s 60.0 there, 70.0 now"),
        ({"seed": 1}, "seed 0 there, 1 now"),
        ({"drain_s": 9.0}, "drain_s 30.0 there, 9.0 now"),
        ({"standing": 2}, "standing 0 there, 2 now"),
        ({"output_tokens": 5}, "output_tokens 4 there, 5 now"),
        ({"decode": {"max_batch_size": 64}}, "decode.max_batch_size 32 there, 64 now"),
        ({"router": {"encoding_processes": 0}}, "router.encoding_processes 2 there, 0 now"),
    ],
)
async def test_runs_that_were_measured_otherwise_are_refused_by_what_differs(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    comparison = Comparison(tmp_path / "split.json")
    await comparison.run()
    assert comparison.measured == [10.0, 20.0]
    held = comparison.output.read_bytes()
    with pytest.raises(MeasuredOtherwise) as refused:
        await comparison.run(**change)
    assert f"tiny on split at 10/s: {said}. Name another file, or" in str(refused.value)
    assert not comparison.measured
    assert comparison.output.read_bytes() == held
    await comparison.run(again=True, **change)
    assert comparison.measured == [10.0, 20.0]
    assert (
        len({json.dumps(each.whole_settings, sort_keys=True) for each in load_runs(comparison.output)}) == 1
    )
    await comparison.run(**change)
    assert not comparison.measured


@pytest.mark.parametrize("again", [False, True])
async def test_an_arrangement_is_not_measured_otherwise_than_those_it_stands_beside(
    again: bool, tmp_path: Path
) -> None:
    comparison = Comparison(tmp_path / "split.json")
    await comparison.run()
    with pytest.raises(MeasuredOtherwise, match=r"tiny on split at 10/s: warmup_s 10\.0 there, 9\.0 now"):
        await comparison.run(chunk=512, warmup_s=9.0, again=again)
    await comparison.run(chunk=512, decode={"max_batch_size": 64}, again=again)  # of one arrangement alone
    assert comparison.measured == [10.0, 20.0]


@pytest.mark.parametrize("what", ["fingerprint", "library_versions"])
async def test_other_code_and_other_libraries_are_settings_too(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = Comparison(tmp_path / "split.json")
    await comparison.run()
    monkeypatch.setattr(identity, what, lambda *folders: "other" if folders else {"torch": "0.1"})
    with pytest.raises(
        MeasuredOtherwise, match=r"torch \S+ there, 0.1 now" if what != "fingerprint" else "code"
    ):
        await comparison.run()


async def test_what_changes_no_figure_is_no_other_setting(tmp_path: Path) -> None:
    comparison = Comparison(tmp_path / "split.json")
    await comparison.run(end_after=None)
    await comparison.run(rates=(10.0, 2.0, 40.0), router={"port": 9, "host": "127.0.0.2"})
    assert comparison.measured == [40.0]


async def test_what_is_measured_again_replaces_all_of_it_even_when_it_ends_early(tmp_path: Path) -> None:
    comparison = Comparison(tmp_path / "split.json")
    await comparison.run()
    with pytest.raises(KeyboardInterrupt):
        await comparison.run(seed=1, again=True, end_after=1)
    assert [(r.rate_per_s, r.settings["seed"]) for r in load_runs(comparison.output)] == [(10.0, 1)]
    await comparison.run(seed=1)
    assert comparison.measured == [20.0]


def test_what_a_repetition_has_not_come_to_is_not_compared_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = Comparison(tmp_path / "split.json")
    asyncio.run(earlier.run(beside_chunk=512))
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(earlier.run(beside_chunk=512, seed=1, again=True, end_after=1))
    shown: list[LoadRun] = []

    async def nothing(*_: object, **__: object) -> None: ...

    monkeypatch.setattr(command, "run_comparison", nothing)
    monkeypatch.setattr(command, "device_name", lambda uses_gpu: "CPU")
    monkeypatch.setattr(command, "print_comparison", lambda runs, *_: shown.extend(runs))
    for seed, arrangement in ((1, "split"), (0, "colocated")):
        shown.clear()
        command.run_command(
            *(deployment({}, {}), [Mix("tiny", 5, 4)], command.Limits(1000.0, (25.0,), 0.9)),
            chunks=[512],
            first_rate_per_s=10.0,
            seed=seed,
            output=earlier.output,
        )
        assert {each.arrangement for each in shown} == {arrangement}


def test_where_a_deployment_is_makes_no_difference() -> None:
    settings = configured(deployment({}, {}))
    places = ("model.path", "router.host", "router.port", "router.api_key_file", "weight_cache.directory")
    assert not settings.keys() & set(places)
    assert {"decode.max_batch_size", "prefill.chunk_tokens", "transfer.layer_groups"} <= settings.keys()


def test_code_is_told_apart_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity.fingerprint(identity.SERVING) != identity.fingerprint(identity.GENERATOR)
    monkeypatch.setattr(identity, "_PACKAGE", tmp_path)
    (tmp_path / "engine").mkdir()
    seen = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.cu", "2"), ("notes.md", "3")):
        (tmp_path / "engine" / name).write_text(text)
        identity.fingerprint.cache_clear()
        seen.add(identity.fingerprint(("engine",)))
    identity.fingerprint.cache_clear()
    assert len(seen) == 3
