"""Which layers are shipped together: known to both sides of a hand-off and to the engine that computes."""

from __future__ import annotations


def layer_range(layers: int, layer_group: int, layer_groups: int) -> range:
    """Layers of a page group that belong to one of ``layer_groups`` parts, in order and without overlap.

    Of three parts and more the last is one layer, since nothing is computed any more while that one is
    shipped; the others share the rest evenly. Two are halves.

    Args:
        layers: of the page group, at least as many as parts.
    """
    if layer_groups <= 2:
        return range(layer_group * layers // layer_groups, (layer_group + 1) * layers // layer_groups)
    bounds = [part * (layers - 1) // (layer_groups - 1) for part in range(layer_groups)] + [layers]
    return range(bounds[layer_group], bounds[layer_group + 1])
