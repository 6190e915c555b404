"""Sections of the page that compare: peers, replicas, split and colocated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.benchmarks.plan.hardware import H200
from antiphon.benchmarks.records import PeerFigure, Record, RecordError, append_records
from antiphon.benchmarks.report.page import render
from antiphon.benchmarks.split.observed import LoadRun, append_run

OURS = Record(
    "decode_step",
    "gpt-oss-20b",
    "TP1",
    H200.name,
    "c",
    "2026-01-01",
    2.0,
    "ms",
    batch=8,
    context=8192,
    floor=1.0,
)


def run(
    arrangement: str, rate: float, itl_ms: float, chunk: int | None = None, device: str = H200.name
) -> LoadRun:
    requests = int(rate * 10)
    return LoadRun(
        arrangement=arrangement,
        chunk_tokens=chunk,
        model="gpt-oss-20b",
        device=device,
        gpus=2,
        mix="chat",
        input_tokens=1000,
        output_tokens=500,
        rate_per_s=rate,
        duration_s=10.0,
        window_s=10.0,
        requests=requests,
        failed=0,
        ttft_ms=[50.0] * requests,
        itl_p99_ms=[itl_ms] * requests,
        ttft_p50_p99_ms=(50.0, 50.0),
        itl_p50_p99_ms=(itl_ms, itl_ms),
        output_tokens_per_s=1.0,
        peer=False,
        commit="c",
        date="d",
        complaints=["it was late"] if arrangement == "split" else [],
    )


def test_the_fastest_way_of_a_peer_stands_beside_ours(tmp_path: Path) -> None:
    peer = replace(OURS, peer="other 1.0", floor=0.9)
    append_records(
        tmp_path / "r.json",
        [
            OURS,
            replace(peer, value=5.0, extra={"resident_weights": "a"}),
            replace(peer, value=3.0, extra={"resident_weights": "b"}),
            replace(peer, value=9.0, layout="TP2"),
            replace(peer, value=1.0, device="another GPU"),
        ],
    )
    page = render(tmp_path)["benchmarks.md"]
    assert "| gpt-oss-20b | TP1 | 8 x 8,192 | 0.9 | 2 | 3 | 1.50 | other 1.0 | apart |" in page
    predicted = next(line for line in page.splitlines() if line.startswith("| gpt-oss-20b | TP2 | 8 x 8,192"))
    assert " p* | 9 | *" in predicted
    # As soon as a layout of ours was measured over as many GPUs, it takes that one's place.
    append_records(tmp_path / "r.json", [replace(OURS, layout="TP2 EP2", value=1.5)])
    page = render(tmp_path)["benchmarks.md"]
    section = page[page.index("## Beside other systems") :]
    assert "| TP2 EP2 | 8 x 8,192 | 1.2 | 1.5 | 9 | 6.00 | other 1.0 (TP2) | apart |" in section
    assert "| gpt-oss-20b | TP2 | 8 x" not in section
    append_records(tmp_path / "r.json", [replace(OURS, layout="TP2", value=1.8)])
    page = render(tmp_path)["benchmarks.md"]
    section = page[page.index("## Beside other systems") :]
    assert "| gpt-oss-20b | TP2 | 8 x 8,192 | 0.9 | 1.8 | 9 | 5.00 | other 1.0 | apart |" in section
    assert "| gpt-oss-20b | TP2 EP2 | 8 x 8,192 | 1.2 | 1.5 |" in section


def test_what_was_measured_in_one_run_goes_before_what_was_measured_apart(tmp_path: Path) -> None:
    apart = replace(OURS, peer="other 1.0", value=3.0)
    pair = replace(
        OURS, value=2.2, date="2026-02-02", beside=PeerFigure("other 1.0", 3.3, "2026-02-02", "TP1")
    )
    append_records(tmp_path / "beside.json", [apart, pair])
    # A later figure of ours that was measured alone does not hide the pair.
    append_records(tmp_path / "r.json", [replace(OURS, value=1.9, date="2026-03-03")])
    page = render(tmp_path)["benchmarks.md"]
    assert "| 8 x 8,192 | 1 | 2.2 | 3.3 | 1.50 | other 1.0 | 2026-02-02 |" in page
    assert "other 1.0 | apart |" not in page
    (entry,) = (e for e in json.loads((tmp_path / "beside.json").read_text()) if isinstance(e["peer"], dict))
    whole = {"system": "other 1.0", "value": 3.3, "date": "2026-02-02", "layout": "TP1"}
    assert entry["peer"] == whole
    elsewhere = entry | {"layout": "TP2 EP2", "peer": whole | {"layout": "TP2"}}
    (tmp_path / "beside.json").write_text(json.dumps([elsewhere]))
    page = render(tmp_path)["benchmarks.md"]
    assert "| gpt-oss-20b | TP2 EP2 | 8 x 8,192 | 1 | 2.2 | 3.3 | 1.50 | other 1.0 (TP2) |" in page
    # Its own record of that layout is not set beside what we are expected to need in that layout.
    theirs = entry | {"layout": "TP2", "peer": "other 1.0", "value": 3.3, "commit": "other 1.0"}
    another = theirs | {"context": 32768}
    (tmp_path / "beside.json").write_text(json.dumps([elsewhere, theirs, another]))
    page = render(tmp_path)["benchmarks.md"]
    section = page[page.index("## Beside other systems") :]
    lines = [line for line in section.splitlines() if "other 1.0" in line]
    assert [line.split("|")[2:4] for line in lines] == [
        [" TP2 ", " 8 x 32,768 "],
        [" TP2 EP2 ", " 8 x 8,192 "],
    ]
    (tmp_path / "beside.json").write_text(json.dumps([entry | {"peer": {"system": "other 1.0"}}]))
    with pytest.raises(RecordError, match=r"beside\.json, entry 0"):
        render(tmp_path)


def test_replicas_are_not_set_beside_one_that_holds_other_weights(tmp_path: Path) -> None:
    prompt = replace(OURS, bench="prefill", batch=1, context=None, input_tokens=1024)
    append_records(
        tmp_path / "r.json",
        [
            replace(prompt, extra={"resident_weights": "mxfp4"}),
            replace(prompt, layout="TP1 DP2", value=2.2, extra={"resident_weights": "mxfp4 and fp8"}),
        ],
    )
    assert "+10.0%" not in render(tmp_path)["benchmarks.md"]


def test_replicas_stand_beside_one(tmp_path: Path) -> None:
    append_records(tmp_path / "r.json", [OURS, replace(OURS, layout="TP1 DP2", value=2.1)])
    page = render(tmp_path)["benchmarks.md"]
    assert "| gpt-oss-20b | TP1 DP2 | 8 x 8,192 | 2 | 2.1 | +5.0% |" in page
    append_records(tmp_path / "other" / "r.json", [OURS])
    together = replace(OURS, extra={"at_once": "TP1 DP2"})  # nobody was alone
    append_records(tmp_path / "both" / "r.json", [together, replace(OURS, layout="TP1 DP2", value=2.1)])
    assert "+5.0%" not in render(tmp_path / "both")["benchmarks.md"]
    assert "Replicas at the same time" not in render(tmp_path / "other")["benchmarks.md"]


def test_the_split_is_compared_where_gpus_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    append_run(path, run("split", 4.0, 8.0, device="CPU"))
    assert "Not measured on GPUs yet" in render(tmp_path)["benchmarks.md"]
    for each in (run("split", 4.0, 8.0), run("colocated", 2.0, 9.0, 512), run("colocated", 8.0, 40.0, 8192)):
        append_run(path, each)
    files = render(tmp_path)
    page = files["benchmarks.md"]
    assert "### gpt-oss-20b on 2 x NVIDIA H200" in page
    assert "| 10 ms | colocated, chunk 512 | 2.00 | 50.0 / 50.0 | 9.0 / 9.0 | 0.50x |" in page
    assert "| 50 ms | colocated, chunk 8192 | 8.00 | 50.0 / 50.0 | 40.0 / 40.0 | 2.00x |" in page
    assert "at 50 ms **the split loses**, serving 0.50 times" in page
    assert "complained in some of these runs: it was late." in page
    assert "plots/split-gpt-oss-20b-chat.svg" in files


def test_hand_offs_waits_and_sums_stand_in_one_section(tmp_path: Path) -> None:
    stamp = "gpt-oss-20b", "TP1", H200.name, "c", "2026-01-01"
    moved = {"bytes": 206e6, "limit": 380.0, "descriptors": 4, "tail_ms": 0.5, "hidden_share": 0.9}
    split = {"shape": "prefill TP1 + decode TP1"}
    gaps = {"itl_p50_ms": 5.0, "itl_max_ms": 9.0, "tokens_per_s": 5000.0}
    ship = Record("transfer", *stamp, 150.0, "GB/s", input_tokens=8192, floor=300.0, extra={**moved})
    append_records(
        tmp_path / "two.json",
        [
            replace(ship, extra=moved | {"staging_slots": 4, "slot_mib": 64}),
            *(replace(ship, kernel=way) for way in ("mapped, 32 blocks", "mapped, 8 blocks")),
            Record("transfer", *stamp, 23.0, "GB/s", input_tokens=8192, peer="other 1.0"),
            Record("ttft", *stamp, 85.0, "ms", input_tokens=8192, extra={**split}),
            Record("interference", *stamp, 6.0, "ms", input_tokens=8192, extra={**split, **gaps}),
            replace(OURS, bench="all_reduce", layout="TP2", kernel="one launch", value=6.5, batch=1),
            replace(OURS, bench="all_reduce", layout="TP2", kernel="library", value=11.5, batch=1),
        ],
    )
    page = render(tmp_path)["benchmarks.md"]
    for said in ("slots of 64 MiB", "mapped, 32 blocks", "mapped, 8 blocks"):
        assert (
            f"| antiphon | gpt-oss-20b | 8k | {said} | 206 | 150 | 300 (50%) | 380 | 4 | 0.5 | 90% |" in page
        )
    assert "| other 1.0 | gpt-oss-20b | 8k | – | – | 23 | – | – | – | – | – |" in page
    row = "| antiphon | gpt-oss-20b | prefill TP1 + decode TP1 | – | 85 | – | 5 | 6 | 1.20 | 9 | – | 5,000 |"
    assert row in page
    assert "| TP2 | 1 | 6.5 | 11.5 |" in page


def test_figures_of_a_cpu_are_no_hand_offs(tmp_path: Path) -> None:
    record = Record("transfer", "tiny", "TP1", "CPU", "c", "2026-01-01", 2.0, "GB/s", input_tokens=512)
    append_records(tmp_path / "cpu.json", [record])
    assert "Not measured on GPUs yet." in render(tmp_path)["benchmarks.md"].split("## KV from prefill")[1]
