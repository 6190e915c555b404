"""The page's section of KV on its way to decode, of a split against one GPU, and of sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.benchmarks.records import Record
from antiphon.benchmarks.report.markdown import short, table, tokens_name

HEAD = """## KV from prefill to decode, and sums over ranks

Two GPUs of one host. A hand-off is from pages to pages, with everything in it: straight into mapped pages,
through slots, or every run of pages by NIXL. NIXL alone is one write in descriptors of 4 MiB in the same run,
the plain copy nothing but bytes. The tail is what is left to move when the last layer was computed, the rest
lies behind compute.
"""
SPLIT = """### A split against one GPU that does both

Workers without Ray and HTTP. Between tokens: {streams} while a prompt of 8k tokens arrives every 0.5 s.
"""
SUMS = """### Sum over ranks, residual and norm

Microseconds in a CUDA graph, by rows of the hidden size: one launch over peer memory, the same in two shots,
and the library's sum with a fused add and norm.
"""
STREAMS = "32 streams at 8,192 tokens of context"


def section(measured: Sequence[Record]) -> str:
    """Whatever of it was measured on GPUs."""
    records = [record for record in measured if record.device != "CPU"]
    parts = [HEAD]
    transfers = [record for record in records if record.bench == "transfer"]
    parts.append(_transfers(transfers) if transfers else "Not measured on GPUs yet.")
    if waits := _waits(records):
        parts += ["", SPLIT.format(streams=STREAMS), waits]
    if sums := _sums([record for record in records if record.bench == "all_reduce"]):
        parts += ["", SUMS, sums]
    return "\n".join(parts)


def _transfers(records: Sequence[Record]) -> str:
    rows = []
    for record in sorted(records, key=lambda each: (each.peer or "", each.model, each.input_tokens or 0)):
        extra, floor = record.extra, record.floor
        rows.append(
            [
                ", ".join(filter(None, (record.peer or "antiphon", str(extra.get("shape") or "")))),
                record.model,
                tokens_name(record.input_tokens or 0),
                _way(record),
                _megabytes(extra.get("bytes")),
                short(record.value),
                "–" if floor is None else f"{short(floor)} ({record.value / floor:.0%})",
                _number(extra.get("limit")),
                str(extra.get("descriptors", "–")),
                _number(extra.get("tail_ms")),
                _share(extra.get("hidden_share")),
            ]
        )
    head = ["system", "model", "prompt", "way", "MB", "GB/s", "NIXL alone, GB/s", "plain copy", "descriptors"]
    return table([*head, "tail, ms", "behind compute"], rows)


def _way(record: Record) -> str:
    """How KV went; the first records say only how many slots there were."""
    if record.kernel is None and record.extra.get("staging_slots"):
        return f"slots of {record.extra['slot_mib']} MiB"
    return record.kernel or "–"


def _waits(records: Sequence[Record]) -> str:
    """A row for each shape of each system; the columns that its records have."""
    shapes: dict[tuple[str, str, str], dict[str, str]] = {}
    for record in records:
        if record.bench not in ("ttft", "interference") or "shape" not in record.extra:
            continue
        row = shapes.setdefault((record.peer or "antiphon", record.model, str(record.extra["shape"])), {})
        if record.bench == "ttft":
            row[f"TTFT {tokens_name(record.input_tokens or 0)}"] = short(record.value)
            continue
        middle = record.extra.get("itl_p50_ms")
        row["p50"], row["p99"] = _number(middle), short(record.value)
        row["p99 / p50"] = f"{record.value / middle:.2f}" if isinstance(middle, float) else "–"
        row["max"] = _number(record.extra.get("itl_max_ms"))
        row["TTFT of arrivals"] = _number(record.extra.get("arrivals_ttft_p50_ms"))
        row["tokens/s"] = _number(record.extra.get("tokens_per_s"))
    columns = [
        "TTFT 1k",
        "TTFT 8k",
        "TTFT 32k",
        "p50",
        "p99",
        "p99 / p50",
        "max",
        "TTFT of arrivals",
        "tokens/s",
    ]
    rows = [[*key, *(row.get(column, "–") for column in columns)] for key, row in sorted(shapes.items())]
    named = ["p50", "p99", "max"]
    head = [f"between tokens, {column}" if column in named else column for column in columns]
    return table(["system", "model", "workers", *head], rows) if rows else ""


def _sums(records: Sequence[Record]) -> str:
    kernels = list(dict.fromkeys(record.kernel or "" for record in records))
    found = {(record.layout, record.batch or 0, record.kernel or ""): record.value for record in records}
    places = sorted({(layout, batch) for layout, batch, _ in found})
    rows = [
        [layout, str(batch), *(_number(found.get((layout, batch, kernel))) for kernel in kernels)]
        for layout, batch in places
    ]
    return table(["layout", "rows", *kernels], rows) if rows else ""


def _number(value: object) -> str:
    return short(float(value)) if isinstance(value, int | float) else "–"


def _megabytes(value: object) -> str:
    return f"{value / 1e6:,.0f}" if isinstance(value, int | float) else "–"


def _share(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, int | float) else "–"
