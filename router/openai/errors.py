"""OpenAI's error body, and every error that the API answers with."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum

import orjson
from starlette.responses import Response

from antiphon.protocol.errors import AntiphonError


class ErrorType(StrEnum):
    """OpenAI's ``type`` of an error."""

    INVALID_REQUEST = "invalid_request_error"
    AUTHENTICATION = "authentication_error"
    RATE_LIMIT = "rate_limit_error"
    SERVER = "server_error"


class ApiError(AntiphonError):
    """An error with its place in the API. ``message`` is for the client and never repeats prompt text."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: ErrorType = ErrorType.INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["retry-after"] = str(max(math.ceil(retry_after_s), 1))

    def __reduce__(self) -> tuple[Callable[..., ApiError], tuple[object, ...]]:
        """Errors come from other processes too."""
        return _error, (self.status, self.message, self.type, self.param, self.code, self.headers)

    @property
    def metric_type(self) -> str:
        """Label of the error metric: the code, or the type where there is none."""
        return self.code or self.type

    def body(self) -> bytes:
        """The JSON document of this error."""
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )

    def response(self) -> Response:
        """The whole HTTP response."""
        return Response(self.body(), self.status, self.headers, "application/json")


def _error(
    status: int,
    message: str,
    type: ErrorType,
    param: str | None,
    code: str | None,
    headers: dict[str, str],
) -> ApiError:
    return ApiError(status, message, type=type, param=param, code=code, headers=headers)


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400: a field has a value that cannot be used."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    """400: a parameter that would change the output is not supported."""
    return ApiError(400, f"'{param}' is not supported: {why}", param=param, code="unsupported_parameter")


def invalid_api_key() -> ApiError:
    """401: no key, or one that is not accepted."""
    return ApiError(
        401,
        "A valid API key is needed: send it as 'Authorization: Bearer KEY'.",
        type=ErrorType.AUTHENTICATION,
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def model_not_found(name: str) -> ApiError:
    """404: another model is served."""
    return ApiError(404, f"The model '{name}' does not exist here.", param="model", code="model_not_found")


def not_found(path: str) -> ApiError:
    """404: no such URL."""
    return ApiError(404, f"Unknown URL: {path}", code="unknown_url")


def method_not_allowed(method: str, allow: str) -> ApiError:
    """405, with the methods that are."""
    return ApiError(
        405, f"Method {method} is not allowed here.", code="method_not_allowed", headers={"allow": allow}
    )


def body_too_large(limit_bytes: int) -> ApiError:
    """413; what still comes of the body is read and thrown away, so that the client sees the answer."""
    return ApiError(
        413,
        f"The request body is larger than {limit_bytes} bytes.",
        code="request_too_large",
    )


def body_too_slow(size_bytes: int, seconds: float) -> ApiError:
    """408; the connection is closed, since nobody knows what its next bytes would be."""
    return ApiError(
        408,
        f"The request body comes too slowly: {size_bytes} bytes in {seconds:.3g} seconds.",
        code="request_timeout",
        headers={"connection": "close"},
    )


def head_too_slow(seconds: float) -> ApiError:
    """408; the connection is closed."""
    return ApiError(
        408, f"The request's head did not end within {seconds:g} seconds.", code="request_timeout"
    )


def head_too_large(limit_bytes: int) -> ApiError:
    """431; the connection is closed, since what would come next is still this head."""
    return ApiError(
        431, f"The URL and the headers together are larger than {limit_bytes} bytes.", code="head_too_large"
    )


def context_length_exceeded(
    prompt_tokens: int, max_context_tokens: int, param: str, *, at_least: bool = False
) -> ApiError:
    """400: nothing can be generated after a prompt of this length, or of ``at_least`` this length."""
    more = "more than " if at_least else ""
    return ApiError(
        400,
        f"This model's maximum context length is {max_context_tokens} tokens, "
        f"and the prompt alone has {more}{prompt_tokens}. Shorten it.",
        param=param,
        code="context_length_exceeded",
    )


def rate_limited(message: str, retry_after_s: float) -> ApiError:
    """429: too much at one time."""
    return ApiError(
        429, message, type=ErrorType.RATE_LIMIT, code="rate_limit_exceeded", retry_after_s=retry_after_s
    )


def client_left() -> ApiError:
    """499, which is for the log and the metric: nobody is there to read it."""
    return ApiError(499, "The client left.", code="client_closed_request")


def server_error(message: str) -> ApiError:
    """500."""
    return ApiError(500, message, type=ErrorType.SERVER, code="server_error")


def unavailable(message: str, retry_after_s: float) -> ApiError:
    """503: nobody can do it now."""
    return ApiError(
        503, message, type=ErrorType.SERVER, code="service_unavailable", retry_after_s=retry_after_s
    )


def deadline_exceeded(message: str) -> ApiError:
    """504."""
    return ApiError(504, message, type=ErrorType.SERVER, code="timeout")
