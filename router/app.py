"""The HTTP application: which URL leads where."""

from __future__ import annotations

from collections.abc import Callable

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from antiphon import __version__
from antiphon.router.api_keys import ApiKeys
from antiphon.router.http_boundary import (
    HttpBoundary,
    handle_api_error,
    handle_crash,
    handle_disconnect,
    handle_http_exception,
)
from antiphon.router.openai.answer_schemas import (
    ChatCompletionAnswer,
    CompletionAnswer,
    DeletedResponseAnswer,
    DetokenizeAnswer,
    HealthAnswer,
    InputItemsAnswer,
    ModelAnswer,
    ModelListAnswer,
    ReadyAnswer,
    ResponseAnswer,
    TokenizeAnswer,
)
from antiphon.router.openai.chat import chat_completion
from antiphon.router.openai.chat_schema import ChatCompletionRequest
from antiphon.router.openai.completion_schema import CompletionRequest
from antiphon.router.openai.completions import text_completion
from antiphon.router.openai.context import ApiContext
from antiphon.router.openai.errors import ApiError, model_not_found, unavailable
from antiphon.router.openai.generation_response import WORKERS_HEADER
from antiphon.router.openai.kept_responses import (
    ITEMS_QUERY,
    RESPONSE_QUERY,
    delete_response,
    read_input_items,
    read_response,
)
from antiphon.router.openai.responses import create_response
from antiphon.router.openai.responses_schema import ResponsesRequest
from antiphon.router.openai.tokenize import (
    DetokenizeRequest,
    TokenizeTextRequest,
    detokenize,
    tokenize,
)
from antiphon.router.openapi_document import GENERATING, READING, STORED, STREAM, TEXT, describe, operation
from antiphon.router.pages import add_pages
from antiphon.router.request_body import read_body

BODIES = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    TokenizeTextRequest,
    DetokenizeRequest,
)
ANSWERS = (
    ChatCompletionAnswer,
    CompletionAnswer,
    DeletedResponseAnswer,
    DetokenizeAnswer,
    HealthAnswer,
    InputItemsAnswer,
    ModelAnswer,
    ModelListAnswer,
    ReadyAnswer,
    ResponseAnswer,
    TokenizeAnswer,
)


def create_app(context: ApiContext, is_draining: Callable[[], bool]) -> FastAPI:
    """The application of one router. It is wrapped by ``wrap_app`` before it is served."""
    app = FastAPI(
        title="Antiphon",
        description="OpenAI-compatible API of a disaggregated GPT-OSS deployment.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Response,
    )
    app.add_exception_handler(ApiError, handle_api_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    app.add_exception_handler(ClientDisconnect, handle_disconnect)
    app.add_exception_handler(Exception, handle_crash)
    _add_generation(app, context)
    _add_responses(app, context)
    _add_tokenizer(app, context)
    _add_models(app, context)
    _add_operations(app, context, is_draining)
    add_pages(app)
    describe(app, BODIES, ANSWERS, context.model.name)
    return app


def wrap_app(app: FastAPI, context: ApiContext, keys: ApiKeys) -> ASGIApp:
    """The application as it is served; cross-origin answers come before keys, as browsers send none then."""
    boundary = HttpBoundary(app, context.metrics, keys, context.tracer)
    if not context.config.cors_origins:
        return boundary
    return CORSMiddleware(
        boundary,
        allow_origins=context.config.cors_origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "traceresponse", "server-timing", "retry-after", WORKERS_HEADER),
    )


def _add_generation(app: FastAPI, context: ApiContext) -> None:
    name = context.model.name
    chat = operation(
        body=(ChatCompletionRequest,),
        example={"model": name, "messages": [{"role": "user", "content": "Hello!"}]},
        answer=ChatCompletionAnswer,
        also=STREAM,
        errors=GENERATING,
    )
    completion = operation(
        body=(CompletionRequest,),
        example={"model": name, "prompt": "Once upon a time", "max_tokens": 16},
        answer=CompletionAnswer,
        also=STREAM,
        errors=GENERATING,
    )

    @app.post("/v1/chat/completions", tags=["Generation"], openapi_extra=chat)
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        return await chat_completion(context, await read_body(request, context.config))

    @app.post("/v1/completions", tags=["Generation"], openapi_extra=completion)
    async def create_completion(request: Request) -> Response:
        """Go on with a text or token ids."""
        return await text_completion(context, await read_body(request, context.config))


def _add_responses(app: FastAPI, context: ApiContext) -> None:
    path = "/v1/responses/{response_id}"
    stored = {"response_id": "$response.body#/id"}
    creation = operation(
        body=(ResponsesRequest,),
        example={"model": context.model.name, "input": "Hello!"},
        answer=ResponseAnswer,
        also=STREAM,
        errors=GENERATING,
        links={
            name: {"operationId": name, "parameters": stored}
            for name in ("readResponse", "deleteResponse", "readInputItems")
        },
    )

    @app.post("/v1/responses", tags=["Responses"], openapi_extra=creation)
    async def create(request: Request) -> Response:
        """Answer input items, and keep the response unless told otherwise."""
        return await create_response(context, await read_body(request, context.config))

    about = operation(answer=ResponseAnswer, query=RESPONSE_QUERY, errors=(400, *STORED))

    @app.get(path, tags=["Responses"], operation_id="readResponse", openapi_extra=about)
    async def read(response_id: str, request: Request) -> Response:
        """A stored response."""
        return await read_response(context, response_id, request.query_params)

    about = operation(answer=DeletedResponseAnswer, errors=STORED)

    @app.delete(path, tags=["Responses"], operation_id="deleteResponse", openapi_extra=about)
    async def delete(response_id: str) -> Response:
        """Forget a stored response."""
        return await delete_response(context, response_id)

    path = f"{path}/input_items"
    about = operation(answer=InputItemsAnswer, query=ITEMS_QUERY, errors=(400, *STORED))

    @app.get(path, tags=["Responses"], operation_id="readInputItems", openapi_extra=about)
    async def input_items(response_id: str, request: Request) -> Response:
        """The items of a stored response's request, a page of them."""
        return await read_input_items(context, response_id, request.query_params)


def _add_tokenizer(app: FastAPI, context: ApiContext) -> None:
    about = operation(
        body=(TokenizeTextRequest, ChatCompletionRequest),
        example={"prompt": "Hello!"},
        answer=TokenizeAnswer,
        errors=READING,
    )

    @app.post("/tokenize", tags=["Tokenizer"], openapi_extra=about)
    async def tokenize_prompt(request: Request) -> Response:
        """Token ids of a text, or of a conversation as it would be rendered."""
        return await tokenize(context, await read_body(request, context.config))

    about = operation(
        body=(DetokenizeRequest,), example={"tokens": [72, 105]}, answer=DetokenizeAnswer, errors=READING
    )

    @app.post("/detokenize", tags=["Tokenizer"], openapi_extra=about)
    async def detokenize_tokens(request: Request) -> Response:
        """The text of token ids."""
        return await detokenize(context, await read_body(request, context.config))


def _add_models(app: FastAPI, context: ApiContext) -> None:
    @app.get("/v1/models", tags=["Models"], openapi_extra=operation(answer=ModelListAnswer, errors=(401,)))
    async def list_models() -> Response:
        """The one model that is served."""
        return _json({"object": "list", "data": [context.model.card()]})

    about = operation(answer=ModelAnswer, errors=(401, 404))

    @app.get("/v1/models/{model:path}", tags=["Models"], openapi_extra=about)
    async def retrieve_model(model: str) -> Response:
        """The served model, by name."""
        if model != context.model.name:
            raise model_not_found(model)
        return _json(context.model.card())


def _add_operations(app: FastAPI, context: ApiContext, is_draining: Callable[[], bool]) -> None:
    @app.get("/health", tags=["Operations"], openapi_extra=operation(answer=HealthAnswer))
    async def health() -> Response:
        """The process is alive."""
        return _json({"status": "ok"})

    about = operation(answer=ReadyAnswer, errors=(503,))

    @app.get("/ready", tags=["Operations"], openapi_extra=about)
    async def ready() -> Response:
        """A prefill and a decode worker have moved a test page, and requests are taken.

        A decode worker that computes prompts itself is named as both.
        """
        if is_draining():
            raise unavailable("The server is shutting down.", 5)
        pairs = context.dispatcher.fleet.pairs()
        if not pairs:
            linked = len(context.dispatcher.fleet)
            raise unavailable(
                f"No ready pair of a prefill and a decode worker; {linked} workers are linked.", 5
            )
        return _json({"status": "ready", "pairs": [{"prefill": p, "decode": d} for p, d in pairs]})

    @app.get("/metrics", tags=["Operations"], openapi_extra=operation(also=TEXT))
    async def metrics(request: Request) -> Response:
        """Prometheus metrics, with exemplars for a scraper that accepts OpenMetrics."""
        text, content_type = context.metrics.exposition(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})


def _json(document: object) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
