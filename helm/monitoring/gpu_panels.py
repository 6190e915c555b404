"""Panels of GPUs: their metrics come from NVIDIA's dcgm-exporter, as listed in ``DCGM_METRICS``."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builder
from panels import WINDOW, Panel, Query, lines

DCGM_METRICS = {
    "DCGM_FI_DEV_GPU_UTIL": "share of time with a kernel running, %",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "share of cycles with tensor cores active, 0-1",
    "DCGM_FI_PROF_DRAM_ACTIVE": "share of cycles with device memory active, 0-1",
    "DCGM_FI_DEV_FB_USED": "memory in use, MiB",
    "DCGM_FI_DEV_FB_FREE": "memory free, MiB",
    "DCGM_FI_DEV_POWER_USAGE": "W",
    "DCGM_FI_DEV_GPU_TEMP": "°C",
    "DCGM_FI_DEV_XID_ERRORS": "code of the last error",
    "DCGM_FI_PROF_PCIE_TX_BYTES": "bytes",
    "DCGM_FI_PROF_PCIE_RX_BYTES": "bytes",
}
"""Metrics of dcgm-exporter's default set that the GPU dashboard shows; labels ``Hostname`` and ``gpu``."""


def gpu() -> list[Panel | builder.Row]:
    """What do the GPUs do?"""

    def each(expression: str) -> Query:
        return Query(expression, "{{Hostname}} GPU {{gpu}}")

    def dcgm(metric: str) -> str:
        return f"max by (Hostname, gpu) ({metric})"

    used, free = dcgm("DCGM_FI_DEV_FB_USED"), dcgm("DCGM_FI_DEV_FB_FREE")
    return [
        lines("Kernel running", "Share of time.", "percent", each(dcgm("DCGM_FI_DEV_GPU_UTIL")), maximum=100),
        lines(
            "Tensor cores active",
            "Share of cycles; prefill lives here.",
            "percentunit",
            each(dcgm("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")),
        ),
        lines(
            "Device memory active",
            "Share of cycles; decode lives here.",
            "percentunit",
            each(dcgm("DCGM_FI_PROF_DRAM_ACTIVE")),
        ),
        lines(
            "Memory in use",
            "Of what there is.",
            "percentunit",
            each(f"{used} / ({used} + {free})"),
            maximum=1,
        ),
        lines("Power", "", "watt", each(dcgm("DCGM_FI_DEV_POWER_USAGE"))),
        lines("Temperature", "", "celsius", each(dcgm("DCGM_FI_DEV_GPU_TEMP"))),
        lines(
            "PCIe",
            "Bytes per second, both ways. KV that goes through the host shows here.",
            "Bps",
            each(
                f"sum by (Hostname, gpu) (rate(DCGM_FI_PROF_PCIE_TX_BYTES[{WINDOW}]))"
                f" + sum by (Hostname, gpu) (rate(DCGM_FI_PROF_PCIE_RX_BYTES[{WINDOW}]))"
            ),
        ),
        lines("Last error", "Code of the last XID error.", "none", each(dcgm("DCGM_FI_DEV_XID_ERRORS"))),
    ]
