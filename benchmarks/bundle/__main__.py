"""Makes a bundle for measuring on a GPU machine without network, which has Python, torch, Triton and NumPy.

    python -m antiphon.benchmarks.bundle workers --out bundle

The folder holds compiled CUDA libraries and the wheels that the machine lacks, in parts of a bounded size,
and scripts that install and measure. docs/measuring.md says how it is used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from antiphon.benchmarks.bundle.kinds import KINDS, scripts_of
from antiphon.benchmarks.bundle.make import CACHE, make
from antiphon.protocol.errors import AntiphonError


def main(arguments: Sequence[str] | None = None) -> int:
    """Make one, and say what it holds."""
    kinds = "; ".join(f"{kind.name}: {kind.purpose}" for kind in KINDS.values())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=kinds, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the bundle, replaced when it is one"
    )
    parser.add_argument("--part-mib", type=float, default=60.0, help="largest part, in MiB")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder that keeps what was fetched")
    parser.add_argument(
        "--peer-tree", type=Path, help="of kind peer: folder or archive with site/, which travels by itself"
    )
    options = parser.parse_args(arguments)
    if (options.kind == "peer") != (options.peer_tree is not None):
        parser.error("--peer-tree belongs to kind peer, which needs it")
    try:
        manifest = make(options.kind, options.out, options.part_mib, options.cache, options.peer_tree)
    except (AntiphonError, LookupError) as error:
        print(error, file=sys.stderr)
        return 1
    for part in range(1, manifest.parts + 1):
        items = [item for item in manifest.items if item.part == part]
        size = sum(item.size_bytes for item in items) / 2**20
        print(f"{options.out}/part-{part}: {len(items)} files, {size:.1f} MiB")
    print(f"{options.out}: {', '.join(scripts_of(options.kind))} at {manifest.commit[:12]}")
    if manifest.peer_tree is not None:
        print(f"to be there as well: {manifest.peer_tree.path}, or what PEER_TREE= names when setup.sh runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
