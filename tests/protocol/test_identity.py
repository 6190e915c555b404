"""Who speaks: versions, epochs and fingerprints."""

from __future__ import annotations

import re
from pathlib import Path

from antiphon.protocol import identity


def test_the_history_says_what_every_version_changed() -> None:
    text = Path(identity.__file__).read_text()
    history = text.split("PROTOCOL_VERSION = ")[1].split('"""')[1]
    versions = [int(number) for number in re.findall(r"^(\d+): ", history, re.MULTILINE)]
    assert versions == list(range(1, identity.PROTOCOL_VERSION + 1))
