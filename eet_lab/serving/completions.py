"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from eet_lab.errors import EETError
from eet_lab.models.chat import as_messages
from eet_lab.serving.bodies import ChatBody, CompletionBody, Sampled, StreamOptions, parsed
from eet_lab.serving.errors import ApiError, bad, of_engine
from eet_lab.serving.forms import CHAT, TEXT, Form
from eet_lab.serving.front import SHORT, Front
from eet_lab.serving.gate import read_body
from eet_lab.serving.generating import Generating, settings_of
from eet_lab.serving.stream import EventStream
from eet_lab.words import told


async def complete(service: Front, request: Request) -> Response:
    """Continue one prompt or several."""
    service.check_kind(False, request.url.path)
    body = parsed(await read_body(request.receive, service.options), CompletionBody)
    service.check_model(body.model)
    prompts = [await _encoded(service, prompt) for prompt in token_lists(body.prompt, "prompt")]
    return await _generated(service, request, body, prompts, 16 if body.max_tokens is None else body.max_tokens, TEXT)


async def chat(service: Front, request: Request) -> Response:
    """Say what follows a conversation."""
    service.check_kind(False, request.url.path)
    body = parsed(await read_body(request.receive, service.options), ChatBody)
    service.check_model(body.model)
    template = await service.template()
    try:
        messages = as_messages(body.messages)
        is_long = sum(len(message["content"]) for message in messages) > SHORT
        prompt = await asyncio.to_thread(template.ids, messages) if is_long else template.ids(messages)
    except EETError as error:
        raise of_engine(error, "messages") from error
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return await _generated(service, request, body, [prompt], asked, CHAT)


async def _generated(
    service: Front, request: Request, body: Sampled, prompts: Sequence[list[int]], asked: int | None, form: Form
) -> Response:
    settings, state = settings_of(body, prompts, asked, service), request.state
    head = {"id": f"{form.prefix}-{state.request_id}", "created": service.created_now(), "model": service.name}
    generating = Generating(service, prompts, body, state.ticket)
    try:
        generating.start(settings, request.receive)
        pieces = generating.pieces()
        first = await anext(pieces)
        if body.stream:
            return EventStream(form, head, generating, first, pieces, body.stream_options or StreamOptions())
        texts = [""] * len(generating.choices)
        for piece in first:
            texts[piece.number] += piece.text
        async for found in pieces:
            for piece in found:
                texts[piece.number] += piece.text
    except BaseException:
        generating.close()
        raise
    generating.close()
    if generating.is_abandoned:
        raise ApiError(499, "The client has left.")
    return JSONResponse(form.whole(head, generating, texts))


def token_lists(given: Any, name: str) -> list[str | list[int]]:
    """A text, or a list of them, each a text or token ids; ApiError, with the field's name, for what is none."""
    if isinstance(given, str) or (isinstance(given, list) and given and all(map(_is_token, given))):
        return [given]
    fine = isinstance(given, list) and all(
        isinstance(each, str) or (isinstance(each, list) and each and all(map(_is_token, each))) for each in given
    )
    if not fine or not given:
        raise bad(
            f"{name} is {told(given)}, but it must be a text, a list of token ids, or a list of those.",
            name,
        )
    return given


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


async def _encoded(service: Front, prompt: str | list[int]) -> list[int]:
    try:
        return await service.encode(prompt)
    except EETError as error:
        raise of_engine(error, "prompt") from error
