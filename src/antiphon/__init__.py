"""Antiphon: disaggregated prefill/decode serving of GPT-OSS models."""

__version__ = "0.1.0"
