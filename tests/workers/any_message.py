"""Messages of every class with any content: types fit, as the codec sees to it, and nothing else does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from antiphon.protocol.codec import AnyMessage, WireMessage
from antiphon.protocol.messages import Message

REQUESTS_AND_KV: tuple[type[Message], ...] = get_args(AnyMessage)
EVERY_CLASS: tuple[type[Message], ...] = get_args(WireMessage)

_INTEGERS = (0, 0, 1, 1, 1, 2, 3, 5, -1, -8, 2**31, 2**40, 2**63 - 1, -(2**63), 2**64 - 1)
_FLOATS = (0.0, 1.0, 0.25, -1.0, 1e-320, float("inf"), float("-inf"), float("nan"))
_STRINGS = ("", "full", "sliding", "DRAM", "VRAM", "connection", "handshake", "a/1/0", "nobody", "\0")


class AnyMessages:
    """Draws messages.

    Args:
        known: values that mean something to whoever is told: ids, epochs, structs such as a fingerprint.
            They are drawn half of the time where their type fits.
        right: messages as they should be. Most messages of their classes are such ones with a field or two
            drawn anew, or none.
    """

    def __init__(self, seed: int, known: Sequence[object], right: Sequence[Message]) -> None:
        self._random = random.Random(seed)
        self._right: dict[type[Message], list[Message]] = {}
        for message in right:
            self._right.setdefault(type(message), []).append(message)
        self._known: dict[type, list[object]] = {}
        for value in known:
            self._known.setdefault(type(value), []).append(value)

    def draw(self, kind: type[Message]) -> Message:
        """A message of a class."""
        if kind in self._right and self._random.random() < 0.8:
            drawn: object = self._random.choice(self._right[kind])
            for _ in range(self._random.randrange(3)):
                drawn = self._altered(drawn, msgspec.inspect.type_info(kind))
        else:
            drawn = self._struct(msgspec.inspect.type_info(kind))
        assert isinstance(drawn, Message)
        return drawn

    def _altered(self, value: Any, info: Any) -> Any:
        """A value with one part of it drawn anew, or drawn as a whole."""
        if isinstance(info, msgspec.inspect.StructType) and info.fields:
            field = self._random.choice(info.fields)
            old = getattr(value, field.name)
            return msgspec.structs.replace(value, **{field.name: self._altered(old, field.type)})
        if isinstance(info, msgspec.inspect.ListType | msgspec.inspect.VarTupleType) and value:
            index = self._random.randrange(len(value))
            parts = [*value[:index], self._altered(value[index], info.item_type), *value[index + 1 :]]
            return parts if isinstance(value, list) else tuple(parts)
        return self._value(info)

    def _struct(self, info: Any) -> object:
        usual = self._random.random() < 0.5
        fields = {
            field.encode_name: self._value(field.type)
            for field in info.fields
            if field.required or not usual or self._random.random() < 0.2
        }
        return info.cls(**fields)

    def _value(self, info: Any) -> Any:
        choose, known = self._random.choice, self._known
        match info:
            case msgspec.inspect.StructType():
                if info.cls in known and self._random.random() < 0.7:
                    return choose(known[info.cls])
                return self._struct(info)
            case msgspec.inspect.BoolType():
                return self._random.random() < 0.5
            case msgspec.inspect.IntType():
                return choose(known[int]) if self._random.random() < 0.5 else choose(_INTEGERS)
            case msgspec.inspect.FloatType():
                return choose(_FLOATS)
            case msgspec.inspect.StrType():
                return choose(known[str]) if self._random.random() < 0.5 else choose(_STRINGS)
            case msgspec.inspect.BytesType():
                return choose(known[bytes]) if self._random.random() < 0.5 else self._random.randbytes(9)
            case msgspec.inspect.EnumType():
                return choose(list(info.cls))
            case msgspec.inspect.NoneType():
                return None
            case msgspec.inspect.UnionType():
                return self._value(choose(info.types))
            case msgspec.inspect.ListType():
                return [self._value(info.item_type) for _ in range(self._random.randrange(4))]
            case msgspec.inspect.VarTupleType():
                return tuple(self._value(info.item_type) for _ in range(self._random.randrange(4)))
            case msgspec.inspect.TupleType():
                return tuple(self._value(each) for each in info.item_types)
            case msgspec.inspect.DictType():
                keys = [self._value(info.key_type) for _ in range(self._random.randrange(3))]
                return {key: self._value(info.value_type) for key in keys}
            case _:
                raise TypeError(f"no values of {info}")
