"""Compile every CUDA library of the kernels while an image is made; needs nvcc, but no GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from antiphon import kernels
from antiphon.kernels.cuda_library import CudaLibrary


def libraries() -> Iterator[CudaLibrary]:
    """What modules of ``antiphon.kernels`` call LIBRARY."""
    root = Path(next(iter(kernels.__path__)))
    for path in sorted(root.rglob("*.py")):
        if "LIBRARY = CudaLibrary(" in path.read_text():
            module = importlib.import_module(
                ".".join(("antiphon.kernels", *path.relative_to(root).with_suffix("").parts))
            )
            yield module.LIBRARY


def main() -> int:
    """Build all of them."""
    built = [library.build() for library in libraries()]
    for path in built:
        sys.stdout.write(f"{path}\n")
    return 0 if built else 1


if __name__ == "__main__":
    sys.exit(main())
