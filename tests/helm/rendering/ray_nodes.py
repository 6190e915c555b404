"""Runs the nodes of a Ray cluster on this machine, in a process of its own, until standard input ends.

The only argument is a JSON list of what nodes offer, the head first; the address is printed. Ray keeps
settings for the life of a process, so a test process that has used one cluster cannot be sure of the next.
"""

from __future__ import annotations

import json
import sys

from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 80_000_000


def main() -> None:
    """Start, print the address, wait, end."""
    head, *nodes = json.loads(sys.argv[1])
    common = {"object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**head, **common, "include_dashboard": False})
    try:
        for node in nodes:
            cluster.add_node(**node, **common)
        sys.stdout.write(f"{cluster.address}\n")
        sys.stdout.flush()
        sys.stdin.read()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
