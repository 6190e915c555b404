"""Request fields that more than one endpoint has, and how a request body is read and refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, TypeVar

import pydantic
from pydantic import Field, JsonValue
from pydantic_core import ErrorDetails

from antiphon.router.openai.errors import ApiError, invalid, unsupported

MAX_STOP_STRINGS = 4
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
"""Every choice takes them along to its worker, which looks at them in every step."""
_INT64 = 1 << 63
Count = Annotated[int, Field(ge=0, lt=_INT64)]
PositiveCount = Annotated[int, Field(ge=1, lt=_INT64)]


class ApiModel(pydantic.BaseModel):
    """Base of everything a client sends: JSON types are not converted, an unknown field is refused."""

    model_config = pydantic.ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class NestedModel(pydantic.BaseModel):
    """Base of objects inside a request: clients send back what they got, with fields of their own."""

    model_config = pydantic.ConfigDict(
        strict=True, extra="ignore", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class StreamOptions(NestedModel):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
    """A last chunk with empty ``choices`` and the usage."""
    continuous_usage_stats: bool | None = None
    """With ``include_usage``: every chunk has the usage so far, without reasoning and cached tokens."""
    include_timing: bool | None = None
    """With ``include_usage``: the usage has what the time to the first token was made of, in seconds."""
    include_obfuscation: bool | None = None
    """Accepted; there is no padding to leave out."""


class SamplingFields(ApiModel):
    """How the next token is chosen, and what only informs."""

    model: str
    """Name of the served model."""
    stream: bool | None = None
    """Server-sent events instead of one document."""
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 is greedy; 1 when absent."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    """-1 and 0 are off."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    """The same seed, prompt and parameters give the same text."""
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    """Up to four texts that end the answer and are left out of it."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Choices per prompt."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIASES)]
        | None
    ) = None
    """Token id (as text) to what is added to its logit; up to 1,024 of them."""
    min_tokens: Count | None = None
    """No stop token before so many output tokens."""
    ignore_eos: bool | None = None
    """Stop tokens do not stop; for benchmarks."""
    priority: Annotated[int, Field(ge=-(1 << 19), le=1 << 19)] | None = None
    """Smaller runs first."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Prefix cache entries are shared only between requests of the same salt."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """Deadline of this request; the deployment's own when absent."""
    user: str | None = None
    """Informs only."""

    def stop_strings(self) -> tuple[str, ...]:
        """The stop texts, without repeats.

        Raises:
            ApiError: one is empty.
        """
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if "" in texts:
            raise invalid("A stop text must not be empty.", "stop")
        return tuple(dict.fromkeys(texts))

    def check_stream_options(self, *, running_usage: bool) -> None:
        """See that the options of a stream can be followed; ``running_usage`` where chunks may carry usage.

        Raises:
            ApiError: 400 that names the option.
        """
        options = self.stream_options
        if options is None:
            return
        if not self.stream:
            raise invalid("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        path = "stream_options.continuous_usage_stats"
        if options.continuous_usage_stats and not running_usage:
            raise unsupported(path, "events of this API carry usage at the end only.")
        for name in ("continuous_usage_stats", "include_timing"):
            path = f"stream_options.{name}"
            if getattr(options, name) and not options.include_usage and running_usage:
                raise invalid(f"'{path}' needs 'include_usage'.", path)

    def reports_timing(self) -> bool:
        """Whether the usage at the end of a stream tells where the time went."""
        return self.stream_options is not None and bool(self.stream_options.include_timing)

    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def reports_running_usage(self) -> bool:
        """Whether every chunk of a stream carries the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def biases(self, vocabulary_size: int) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` with numeric ids.

        Raises:
            ApiError: a key is no token id of this vocabulary.
        """
        pairs = []
        for key, bias in (self.logit_bias or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 10) or int(key) >= vocabulary_size:
                raise invalid(
                    f"'{key[:32]}' is not a token id below {vocabulary_size}.", f"logit_bias.{key[:32]}"
                )
            pairs.append((int(key), bias))
        return tuple(pairs)


Request = TypeVar("Request", bound=ApiModel)


def parse_body(model: type[Request], body: bytes) -> Request:
    """Read a request.

    Raises:
        ApiError: 400 that names the first field in the way.
    """
    try:
        request = model.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _first_problem(error.errors(include_url=False, include_input=False), body) from None
    if _UNUSUAL_NUMBER.search(body):
        json.loads(body, parse_int=_representable, parse_float=_finite, parse_constant=_no_number)
    return request


_UNUSUAL_NUMBER = re.compile(rb"[0-9]{19}|[eE]\+?[0-9]{3}|NaN|Infinity")
"""The bytes of every integer beyond 64 bits, of every float that is not finite, and of few other things."""


def _representable(digits: str) -> int:
    """An integer inside free-form JSON, if what is made of it can hold it: few JSON libraries go further."""
    if len(digits) > 20 or not -_INT64 <= int(digits) < 2 * _INT64:
        raise invalid(f"The integer {digits[:24]}... does not fit into 64 bits.", None, "invalid_json")
    return int(digits)


def _finite(number: str) -> float:
    """A float inside free-form JSON, if it is one: what is beyond all floats would be written as null."""
    value = float(number)
    if math.isinf(value):
        raise invalid(f"The number {number[:24]} is beyond every float.", None, "invalid_json")
    return value


def _no_number(name: str) -> float:
    """``NaN`` and its like, which are not JSON."""
    raise invalid(f"The body is not valid JSON: {name} is no number of JSON's.", None, "invalid_json")


def refuse_unsupported(given: Iterable[tuple[str, JsonValue]], harmless: Mapping[str, JsonValue]) -> None:
    """Refuse fields that would change the output.

    ``harmless`` maps a field to the one value, besides null, that asks for what happens anyway.

    Raises:
        ApiError: 400 that names the field.
    """
    for name, value in given:
        if value is not None and (name not in harmless or value != harmless[name]):
            raise unsupported(name, "this server cannot do it, and leaving it out would change the answer.")


def _first_problem(problems: list[ErrorDetails], body: bytes) -> ApiError:
    # A union reports one problem per branch: the one that got deepest is the branch that was meant, and of
    # two that got as deep the one that has a type to its liking.
    problem = max(problems, key=lambda p: (len(p["loc"]), not p["type"].endswith("_type")))
    kind = problem["type"]
    if kind == "json_invalid":
        return invalid(f"The body is not valid JSON: {problem['msg']}", None, "invalid_json")
    path = field_path(problem["loc"], json.loads(body), absent=kind == "missing")
    if path is None:
        return invalid("The body must be a JSON object.", None, "invalid_type")
    if kind == "missing":
        return invalid(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    if kind == "extra_forbidden":
        return invalid(f"Unrecognized request argument supplied: {path}", path, "unknown_parameter")
    if kind.endswith("_type") or kind in ("model_attributes_type", "literal_error"):
        return invalid(f"Invalid type or value for '{path}': {problem['msg']}.", path, "invalid_type")
    return invalid(f"Invalid value for '{path}': {problem['msg']}.", path)


_MAX_NAME = 64
"""Characters of a name that a client made up, where an error repeats it."""


def field_path(location: Sequence[int | str], document: JsonValue, *, absent: bool) -> str | None:
    """``messages[0].content`` from pydantic's location in ``document``; None is the document itself.

    The location names branches of unions too, which are no part of the document; ``absent`` is that its last
    step is not, either, but should be.
    """
    path, here = None, document
    for number, step in enumerate(location, 1):
        if isinstance(step, int):
            path = f"{path or ''}[{step}]"
            here = here[step] if isinstance(here, list) and step < len(here) else None
        elif isinstance(here, dict) and (step in here or (absent and number == len(location))):
            name = step[:_MAX_NAME]
            path = name if path is None else f"{path}.{name}"
            here = here.get(step)
    return path
