"""A generated text as server-sent events: one for the tokens of a choice that came together, and [DONE] at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

from starlette.responses import Response

from eet_lab.serving.bodies import StreamOptions
from eet_lab.serving.errors import ApiError
from eet_lab.serving.forms import Form, usage_of
from eet_lab.serving.gate import Receive, Scope, Send
from eet_lab.serving.generating import Generating, Step
from eet_lab.serving.replay import Replay

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events back
]


class EventStream(Response):
    """The events of pieces whose first ones are there: what went wrong before them has a status of its own.

    A client that reads slowly holds up no one: what it has not read waits in its own answer, until its time is over.
    """

    def __init__(
        self,
        form: Form,
        head: dict,
        generating: Generating | Replay,
        first: Step,
        steps: AsyncIterator[Step],
        options: StreamOptions,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__()
        self._more = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._form, self._head, self._generating = form, form.head(head), generating
        self._first, self._steps, self._options = first, steps, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._generating.left_s):
                await self._send_all(send)
        except TimeoutError:  # the client does not read: an answer that is cut off closes its connection
            pass
        finally:
            self._generating.close()

    async def _send_all(self, send: Send) -> None:
        async def event(text: str, last: bytes = b"") -> None:
            await send({"type": "http.response.body", "body": text.encode() + last, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *self._more]})
        if openings := [self._form.opening(choice.number) for choice in self._generating.choices]:
            await event("".join(self._event(opening, 0) for opening in openings if opening))
        try:
            await event(self._of(self._first))
            async for step in self._steps:
                await event(self._of(step))
            await event(self._usage(), DONE)
        except ApiError as error:
            await event(f"data: {json.dumps(error.body())}\n\n", DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _of(self, step: Step) -> str:
        return "".join(self._event(self._form.chunk(piece), step.num_tokens) for piece in step.pieces)

    def _event(self, choice: str, num_tokens: int) -> str:
        usage = ""
        if self._options.continuous_usage_stats:
            usage = f',"usage":{self._counted(num_tokens)}'
        elif self._options.include_usage:
            usage = ',"usage":null'
        return f"data: {self._head}{choice}]{usage}}}\n\n"

    def _usage(self) -> str:
        if not self._options.include_usage:
            return ""
        return f'data: {self._head}],"usage":{self._counted(self._generating.completion_tokens)}}}\n\n'

    def _counted(self, num_tokens: int) -> str:
        return json.dumps(usage_of(self._generating.prompt_tokens, num_tokens))
