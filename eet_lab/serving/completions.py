"""/v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from eet_lab.errors import EETError
from eet_lab.models.chat import as_messages
from eet_lab.serving.bodies import ChatBody, CompletionBody, Sampled, StreamOptions, parsed
from eet_lab.serving.errors import ApiError, bad, of_engine
from eet_lab.serving.forms import CHAT, TEXT, Form
from eet_lab.serving.front import SHORT, Front
from eet_lab.serving.gate import read_body
from eet_lab.serving.generating import Generating, Step, settings_of
from eet_lab.serving.replay import Replay, recorded
from eet_lab.serving.response_cache import HIT
from eet_lab.serving.stream import EventStream
from eet_lab.words import told


async def complete(service: Front, request: Request) -> Response:
    """Continue one prompt or several."""
    service.check_kind(False, request.url.path)
    body = parsed(await read_body(request.receive, service.options), CompletionBody)
    service.check_model(body.model)

    async def asked() -> Asked:
        prompts = [await _encoded(service, prompt) for prompt in token_lists(body.prompt, "prompt")]
        return Asked(prompts, 16 if body.max_tokens is None else body.max_tokens)

    return await _answered(service, request, body, asked, TEXT)


async def chat(service: Front, request: Request) -> Response:
    """Say what follows a conversation."""
    service.check_kind(False, request.url.path)
    body = parsed(await read_body(request.receive, service.options), ChatBody)
    service.check_model(body.model)

    async def asked() -> Asked:
        template = await service.template()
        try:
            messages = as_messages(body.messages)
            is_long = sum(len(message["content"]) for message in messages) > SHORT
            prompt = await asyncio.to_thread(template.ids, messages) if is_long else template.ids(messages)
        except EETError as error:
            raise of_engine(error, "messages") from error
        return Asked([prompt], body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens)

    return await _answered(service, request, body, asked, CHAT)


class Asked(NamedTuple):
    """Prompts, and how many tokens shall follow each; None: all that there is room for."""

    prompts: Sequence[list[int]]
    max_tokens: int | None


async def _answered(
    service: Front, request: Request, body: Sampled, asked: Callable[[], Awaitable[Asked]], form: Form
) -> Response:
    """What was answered before, or what the engine says to `asked`."""
    key, ticket = service.cache.key_of(request.url.path, body), request.state.ticket
    if (found := await service.kept(key, request)) is not None:
        replay = Replay(found, ticket.since + service.options.request_s)
        return await _said(service, request, body, replay, replay.steps(), form, HIT)
    try:
        prompts, max_tokens = await asked()
        settings = settings_of(body, prompts, max_tokens, service)
        generating = Generating(service, prompts, body, ticket)
        try:
            generating.start(settings, request.receive)
        except BaseException:
            generating.close()
            raise
    except BaseException:
        service.cache.done(key)
        raise
    steps = generating.steps() if key is None else recorded(generating, service.cache, key)
    return await _said(service, request, body, generating, steps, form, {})


async def _said(
    service: Front,
    request: Request,
    body: Sampled,
    source: Generating | Replay,
    steps: AsyncIterator[Step],
    form: Form,
    headers: Mapping[str, str],
) -> Response:
    """The answer whole, or as a stream, which closes its source itself."""
    number = f"{form.prefix}-{request.state.request_id}"
    head = {"id": number, "created": service.created_now(), "model": service.name}
    try:
        first = await anext(steps)
        if body.stream:
            options = body.stream_options or StreamOptions()
            return EventStream(form, head, source, first, steps, options, headers)
        said = [*first.pieces]
        async for step in steps:
            said += step.pieces
    except BaseException:
        source.close()
        raise
    source.close()
    if source.is_abandoned:
        raise ApiError(499, "The client has left.")
    return JSONResponse(form.whole(head, source, said), headers=dict(headers))


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
