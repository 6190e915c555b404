"""What an output must look like, said so that an engine need not know the format: token ids and grammars.

A grammar is a list of regions. Behind one of a region's trigger sequences the region is open, and until it
closes every token must fit its content. Outside of regions everything may be said. Regions follow each other
or stand apart, they never nest.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec


class OneOfSequences(msgspec.Struct, frozen=True, tag="sequences", forbid_unknown_fields=True):
    """Exactly one of these token sequences, none of which begins another; the region closes behind it."""

    sequences: tuple[tuple[int, ...], ...]


class FreeText(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """Any text: every token but markers."""


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema", forbid_unknown_fields=True):
    """JSON that a schema accepts."""

    schema: str
    """JSON text."""


class LarkGrammar(msgspec.Struct, frozen=True, tag="lark", forbid_unknown_fields=True):
    """Text that a context-free grammar accepts, in the dialect of llguidance."""

    grammar: str


RegionContent = OneOfSequences | FreeText | JsonSchema | LarkGrammar


class GrammarRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the output that is constrained."""

    triggers: tuple[tuple[int, ...], ...]
    """Token sequences that open it when no other region is open. A trigger may reach back into what the
    region before it held."""
    content: RegionContent
    closed_by: tuple[int, ...] = ()
    """Tokens of which one must follow as soon as the content is complete and goes on no further, and may
    follow wherever it is complete. Empty for ``OneOfSequences`` only."""


class GrammarSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The grammar of one output. Of several triggers that match, the longest wins."""

    regions: tuple[GrammarRegion, ...]
    prefix_token_ids: tuple[int, ...] = ()
    """Tokens in front of the output, the end of the prompt, that count as if the output began with them."""

    def problem(self) -> str | None:
        """What makes this grammar unusable whatever the vocabulary is; None when nothing does."""
        seen: set[tuple[int, ...]] = set()
        for number, region in enumerate(self.regions):
            where = f"region {number}"
            if not region.triggers or () in region.triggers:
                return f"{where} has no trigger, or an empty one"
            if not seen.isdisjoint(region.triggers):
                return f"a trigger of {where} opens another region too"
            seen.update(region.triggers)
            if isinstance(region.content, OneOfSequences):
                if region.closed_by:
                    return f"{where} closes by itself"
                if (fault := _sequences_problem(region.content.sequences)) is not None:
                    return f"{where}: {fault}"
            elif not region.closed_by:
                return f"{where} cannot close"
        return None


def _sequences_problem(sequences: tuple[tuple[int, ...], ...]) -> str | None:
    if not sequences or () in sequences:
        return "there is no sequence, or an empty one"
    ordered = sorted(sequences)
    for one, other in pairwise(ordered):
        if other[: len(one)] == one:
            return f"the sequence {list(one)} begins another"
    return None
