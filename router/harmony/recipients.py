"""Whom a message is for: which recipients are functions of the request, and which are not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from antiphon.router.harmony.repairs import Repair

NAMESPACE = "functions."
"""What the format puts before the name of a request's own function."""
_FUNCTIONS_PREFIX = re.compile(r"(?:functions?)+[.:/]+", re.IGNORECASE)
_OTHER_PREFIX = re.compile(
    r"(?:(?:tools?|default|default_api|api|assistant)?[.:/]+|functions?_)", re.IGNORECASE
)
"""Namespaces that models make up; what stands behind one is a function only if it is declared."""
_GLUED = re.compile(
    r"(?:<\|constrain\|>)?(?:json|code|commentary|analysis|final|assistant)$|[^\w)\]}-]+$", re.IGNORECASE
)
_FUNCTION_NAME = re.compile(r"[\w-]+")
_NEVER_FUNCTIONS = frozenset(
    {
        *("assistant", "user", "system", "developer", "tool", "all"),
        *("analysis", "commentary", "final", "functions"),
        *("python", "browser", "container", "web"),
    }
)
"""Roles, channels and the tools that the model knows from its training."""

VISIBLE_RECIPIENTS = frozenset({"user", "all"})
"""Recipients that change nothing: the message is for whoever reads the channel."""


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """Which calls of an answer are surfaced.

    ``names`` are the declared functions; None when the caller does not know them, and then every name that
    may be a function's is one. ``surface`` is False under ``tool_choice`` none; ``allowed`` are the functions
    that it leaves to be called, None when it names none. ``max_calls`` is 1 when calls may not be parallel.
    """

    names: frozenset[str] | None = None
    surface: bool = True
    allowed: frozenset[str] | None = None
    max_calls: int | None = None


@dataclass(frozen=True, slots=True)
class FunctionRecipient:
    """A recipient that is a function, and what was overlooked."""

    name: str
    repair: Repair | None = None


def function_of(recipient: str, names: frozenset[str] | None) -> FunctionRecipient | None:
    """The function that ``recipient`` means, None when it means something else.

    ``functions.f`` is always a function, declared or not: the client answers for a name that it does not
    know. Without the namespace a declared name is a function; an undeclared one only when the declared names
    are not known and it is neither a role, a channel nor a tool of the model's training.
    """
    # As the format has it first: a function may be called "functions.f", and stand beside one called "f".
    if names is not None and recipient.startswith(NAMESPACE) and recipient.removeprefix(NAMESPACE) in names:
        return FunctionRecipient(recipient.removeprefix(NAMESPACE))
    if names is not None and recipient in names:
        return FunctionRecipient(recipient, Repair.RECIPIENT_BARE)
    prefix = _FUNCTIONS_PREFIX.match(recipient)
    if prefix is None:
        return _bare_function(recipient, names)
    name = recipient[prefix.end() :]
    spelling = None if prefix.group() == NAMESPACE else Repair.RECIPIENT_SPELLING
    if names is None:
        name = re.sub(r"[^\w)\]}-]+$", "", name)
        return FunctionRecipient(name, spelling) if name else None
    if name in names:
        return FunctionRecipient(name, spelling)
    declared = _without_glue(name, names)
    if declared is not None:
        return FunctionRecipient(declared, Repair.RECIPIENT_GLUED)
    return FunctionRecipient(name, Repair.RECIPIENT_UNDECLARED) if name else None


def _bare_function(recipient: str, names: frozenset[str] | None) -> FunctionRecipient | None:
    if names is not None:
        declared = _without_glue(recipient, names)
        return None if declared is None else FunctionRecipient(declared, Repair.RECIPIENT_GLUED)
    if recipient.lower() in _NEVER_FUNCTIONS or not _FUNCTION_NAME.fullmatch(recipient):
        return None
    return FunctionRecipient(recipient, Repair.RECIPIENT_BARE)


def _without_glue(name: str, names: frozenset[str]) -> str | None:
    """The declared name that is left once namespaces before and header words after it are taken off."""
    while True:
        if name in names:
            return name
        if (respelt := _respelt(name, names)) is not None:
            return respelt
        prefix = _FUNCTIONS_PREFIX.match(name) or _OTHER_PREFIX.match(name)
        shorter = name[prefix.end() :] if prefix else _GLUED.sub("", name, count=1)
        if shorter == name or not shorter:
            return None
        name = shorter


def _respelt(name: str, names: frozenset[str]) -> str | None:
    """The declared name that differs in capitals only, if there is one and no other."""
    folded = name.casefold()
    alike = [one for one in names if one.casefold() == folded]
    return alike[0] if len(alike) == 1 else None
