"""Test-wide settings that must be in place before any package is imported."""

from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        # Must be set before triton is imported anywhere: kernels then run in the interpreter.
        os.environ.setdefault("TRITON_INTERPRET", "1")
