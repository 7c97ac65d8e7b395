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
from eet_lab.serving.forms import CHAT, TEXT, EventStream, Form
from eet_lab.serving.front import SHORT, Front
from eet_lab.serving.gate import read_body
from eet_lab.serving.generating import Generating, Step, settings_of
from eet_lab.serving.response_cache import HIT, Replay, recorded
from eet_lab.serving.truncation import last_of, most_of
from eet_lab.words import told


async def complete(front: Front, request: Request) -> Response:
    """Continue one prompt or several."""
    front.check_kind(False, request.url.path)
    body = parsed(await read_body(request.receive, front.options), CompletionBody)
    front.check_model(body.model)

    async def asked() -> Asked:
        given, new_tokens = token_lists(body.prompt, "prompt"), 16 if body.max_tokens is None else body.max_tokens
        if (most := body.truncate_prompt_tokens) is not None:
            # Of a max_tokens that leaves no room at all is told with the settings.
            room, what = front.columns - new_tokens, f"prompt beside {new_tokens:,} new ones"
            most = most_of(front, most, room, given, what) if room > 0 else 1
        prompts = [await _encoded(front, prompt) for prompt in given]
        if most is not None:
            prompts = [last_of(front, *each, most) for each in zip(given, prompts, strict=True)]
        return Asked(prompts, new_tokens)

    return await _answered(front, request, body, asked, TEXT)


async def chat(front: Front, request: Request) -> Response:
    """Say what follows a conversation."""
    front.check_kind(False, request.url.path)
    body = parsed(await read_body(request.receive, front.options), ChatBody)
    front.check_model(body.model)

    async def asked() -> Asked:
        template = await front.template()
        try:
            messages = as_messages(body.messages)
            is_long = sum(len(message["content"]) for message in messages) > SHORT
            prompt = await asyncio.to_thread(template.ids, messages) if is_long else template.ids(messages)
        except EETError as error:
            raise of_engine(error, "messages") from error
        return Asked([prompt], body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens)

    return await _answered(front, request, body, asked, CHAT)


class Asked(NamedTuple):
    """Prompts, and how many tokens shall follow each; None: all that there is room for."""

    prompts: Sequence[list[int]]
    max_tokens: int | None


async def _answered(
    front: Front, request: Request, body: Sampled, asked: Callable[[], Awaitable[Asked]], form: Form
) -> Response:
    """What was answered before, or what the engine says to `asked`."""
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options is only for a stream. Add stream=true, or leave it out.", "stream_options")
    key, ticket = front.cache.key_of(request.url.path, body), request.state.ticket
    if (found := await front.kept(key, request)) is not None:
        replay = Replay(found, ticket.since + front.options.request_s)
        return await _said(front, request, body, replay, replay.steps(), form, HIT)
    try:
        prompts, max_tokens = await asked()
        settings = settings_of(body, prompts, max_tokens, front)
        generating = Generating(front, prompts, body, ticket)
        try:
            generating.start(settings, request.receive)
        except BaseException:
            generating.close()
            raise
    except BaseException:
        front.cache.done(key)
        raise
    steps = generating.steps() if key is None else recorded(generating, front.cache, key)
    return await _said(front, request, body, generating, steps, form, {})


async def _said(
    front: Front,
    request: Request,
    body: Sampled,
    source: Generating | Replay,
    steps: AsyncIterator[Step],
    form: Form,
    headers: Mapping[str, str],
) -> Response:
    """The answer whole, or as a stream, which closes its source itself."""
    number = f"{form.prefix}-{request.state.request_id}"
    head = {"id": number, "created": front.created_now(), "model": front.name}
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

    def is_one(each: Any) -> bool:
        return isinstance(each, str) or (isinstance(each, list) and {*map(type, each)} == {int})

    if is_one(given):
        return [given]
    if not isinstance(given, list) or not given or not all(map(is_one, given)):
        raise bad(f"{name} is {told(given)}, but it must be a text, a list of token ids, or a list of those.", name)
    return given


async def _encoded(front: Front, prompt: str | list[int]) -> list[int]:
    try:
        return await front.encode(prompt)
    except EETError as error:
        raise of_engine(error, "prompt") from error
