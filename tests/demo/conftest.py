"""What the tests of the demo model share."""

from __future__ import annotations

import pytest

from antiphon.router.harmony.vocabulary import ranks_path


@pytest.fixture(scope="session")
def harmony_vocabulary() -> None:
    """The vocabulary that the package ships, for openai-harmony's own loader."""
    from antiphon.demo import harmony

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(ranks_path().parent))
        harmony.encoding()
