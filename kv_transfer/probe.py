"""The bytes of a probe: pseudo-random, and known to both sides from one number.

Every head of every layer has bytes of its own, and a rank makes those of its heads alone. So a probe that
arrives as it should also shows that both sides mean the same heads and layers by the same places, whatever
the number of ranks on either side.
"""

from __future__ import annotations

import numpy as np

from antiphon.kv_transfer.plan import GroupLayout, Shard

_GROUPS = ("full", "sliding")


def probe_page(seed: int, group: str, layout: GroupLayout, shard: Shard) -> bytes:
    """What one rank's probe page of a group holds.

    Args:
        seed: the writer's epoch.
        group: ``full`` or ``sliding``.
    """
    blocks = []
    for layer in range(layout.layers):
        for head in layout.heads(shard):
            name = np.random.SeedSequence([seed, _GROUPS.index(group), layer, head])
            blocks.append(np.random.Generator(np.random.PCG64(name)).bytes(layout.head_bytes))
    return b"".join(blocks)
