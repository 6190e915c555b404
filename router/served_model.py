"""What the API says about the one model that a deployment serves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServedModel:
    """``created`` is in Unix seconds; ``fingerprint`` changes when the weights or their revision do."""

    name: str
    max_context_tokens: int
    """Prompt and output together."""
    created: int
    fingerprint: str
    owned_by: str = "antiphon"

    def card(self) -> dict[str, str | int]:
        """The model object of OpenAI's API, with the context length as an extra field."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": self.owned_by,
            "max_model_len": self.max_context_tokens,
        }
