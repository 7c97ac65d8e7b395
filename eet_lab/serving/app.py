"""The routes of a server, which are OpenAI's and vLLM's."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from eet_lab import __version__
from eet_lab.serving.completions import chat, complete
from eet_lab.serving.errors import ApiError
from eet_lab.serving.front import Front
from eet_lab.serving.gate import Gate
from eet_lab.words import told


async def _embed(front: Front, request: Request) -> Response:
    """A vector of each text, as `eet_lab.encode` makes it: it is not scaled to length 1."""
    front.check_kind(True, request.url.path)
    from eet_lab.serving.vectors import embed  # with torch, as every front of an encoder

    return await embed(front, request)  # type: ignore[arg-type]


async def _classify(front: Front, request: Request) -> Response:
    """The classes of each text, in vLLM's form: the likeliest one's label, and the scores of all."""
    front.check_kind(True, request.url.path)
    from eet_lab.serving.vectors import classify

    return await classify(front, request)  # type: ignore[arg-type]


Handler = Callable[[Front, Request], Awaitable[Response]]
POSTS: dict[str, Handler] = {
    "/v1/completions": complete,
    "/v1/chat/completions": chat,
    "/v1/embeddings": _embed,
    "/v1/classify": _classify,
}


def app_of(front: Front) -> Gate:
    """An ASGI app that serves this."""
    # The pages that show an API load scripts from elsewhere; /openapi.json is enough for programs.
    app = FastAPI(title="EET Lab", version=__version__, docs_url=None, redoc_url=None)
    for method, handlers in (("POST", POSTS), ("GET", GETS | {"/v1/models/{name:path}": _model})):
        for path, handler in handlers.items():
            app.add_api_route(path, _served(front, handler), methods=[method], name=handler.__name__.strip("_"))
    app.add_exception_handler(ApiError, _told)
    app.add_exception_handler(HTTPException, _not_found)
    app.add_exception_handler(Exception, _failed)
    return Gate(app, front.options, front.admission, front.metrics)


def _served(front: Front, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def served(request: Request) -> Response:
        return await handler(front, request)

    # FastAPI resolves annotations by the names of this module, where postponed ones are strings.
    served.__annotations__ = {"request": Request, "return": Response}
    served.__doc__ = handler.__doc__
    return served


async def _health(front: Front, request: Request) -> Response:
    """Whether requests are served; 503 while the server shuts down, or once its engine is lost."""
    if front.worker.dead is not None:
        raise front.worker.dead
    if front.admission.is_draining:
        raise ApiError(503, "The server is shutting down.", code="shutting_down")
    return JSONResponse({"status": "ok", "model": front.name})


async def _metrics(front: Front, request: Request) -> Response:
    """Counts for Prometheus."""
    return Response(await front.metrics_text(), media_type=CONTENT_TYPE_LATEST)


async def _models(front: Front, request: Request) -> Response:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_described(front)]})


async def _model(front: Front, request: Request) -> Response:
    """The model of this name; 404 for another."""
    front.check_model(request.path_params["name"])
    return JSONResponse(_described(front))


def _described(front: Front) -> dict[str, object]:
    return {
        "id": front.name,
        "object": "model",
        "created": front.created,
        "owned_by": "eet_lab",
        "max_model_len": front.columns,
        "vocab_size": front.card.vocab_size,
        "recipe": str(front.card.recipe),
    }


GETS: dict[str, Handler] = {"/health": _health, "/metrics": _metrics, "/v1/models": _models}


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    # In ASCII: a message may quote what no encoding takes.
    return Response(json.dumps(error.body()), error.status, error.headers(), "application/json")


async def _not_found(request: Request, error: Exception) -> Response:
    """A route or a method that does not exist."""
    assert isinstance(error, HTTPException)
    there = f"POST is for {', '.join(POSTS)}, and GET for {', '.join(GETS)}"
    asked = f"{told(request.method)[1:-1]} {told(request.url.path)}"
    response = await _told(request, ApiError(error.status_code, f"{asked}: {error.detail}. {there}."))
    response.headers.update(error.headers or {})  # which methods there are
    return response


async def _failed(request: Request, error: Exception) -> Response:
    """Our own fault; the error goes on to the log."""
    number = request.state.request_id
    return await _told(
        request, ApiError(500, f"The server failed. Its log has the reason under {number}.", code=number)
    )
