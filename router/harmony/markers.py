"""Token ids of the Harmony markers.

Ids below ``FIRST_SPECIAL`` are text (o200k_base); every id from there up to ``VOCABULARY_SIZE`` names a
marker, most of them reserved and without meaning.
"""

from __future__ import annotations

START_OF_TEXT = 199998
END_OF_TEXT = 199999
RETURN = 200002
CONSTRAIN = 200003
CHANNEL = 200005
START = 200006
END = 200007
MESSAGE = 200008
CALL = 200012

FIRST_SPECIAL = 199998
VOCABULARY_SIZE = 201088

STOP_IDS = (RETURN, CALL, END_OF_TEXT)
"""What ends an answer. ``END`` does not: the model goes on with the next message after it."""

TERMINATORS = frozenset({END, RETURN, CALL, END_OF_TEXT})
"""What ends a message."""
