"""Values of options that the benchmarks' commands share."""

from __future__ import annotations

import math

from antiphon.protocol.errors import ConfigError


def limit_s(text: str | None, option: str = "limit") -> float:
    """Seconds of such as ``500s``; no limit when absent.

    Raises:
        AntiphonError: it is no duration.
    """
    from antiphon.benchmarks.serve.slo import parse_duration_s

    return math.inf if text is None else parse_duration_s(text, option)


def parts(text: str) -> list[str]:
    """What stands between the commas."""
    return [each.strip() for each in text.split(",") if each.strip()]


def whole(text: str, option: str) -> int:
    """A positive number.

    Raises:
        ConfigError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{option} {text!r}: not a positive number")
    return int(text)


def positive(text: str, option: str) -> float:
    """A positive number, whole or not.

    Raises:
        ConfigError: it is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (number > 0 and math.isfinite(number)):
        raise ConfigError(f"{option} {text!r}: not a positive number")
    return number


def durations_s(text: str, option: str) -> dict[str, float]:
    """``20s,long-out=40s``: seconds by name, what has none under the empty one.

    Raises:
        AntiphonError: a part is no duration.
    """
    from antiphon.benchmarks.serve.slo import parse_duration_s

    found = {}
    for part in parts(text):
        name, equals, value = part.rpartition("=")
        found[name if equals else ""] = parse_duration_s(value, option)
    return found
