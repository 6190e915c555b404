"""Antiphon: disaggregated prefill/decode serving of GPT-OSS models."""

__version__ = "0.1.0"
"""The one place a version is read from, installed or not; that of ``pyproject.toml``."""
