"""Generated text as OpenAI writes it: whole, or as a stream of server-sent events that ends in [DONE]."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from eet_lab.serving.bodies import StreamOptions
from eet_lab.serving.errors import ApiError, took_too_long
from eet_lab.serving.generating import Generating, Piece, Step
from eet_lab.serving.logprobs import Scored, of_chat, of_completion
from eet_lab.serving.response_cache import Replay

DONE = b"data: [DONE]\n\n"
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}
LAST_S = 1.0
"""What a client whose time is over gets to read why."""
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events back
]


def usage_of(prompt_tokens: int, completion_tokens: int = 0) -> dict[str, int]:
    """OpenAI's count of tokens."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


@dataclass(frozen=True)
class Form:
    """What one endpoint calls its objects and how a choice looks in them."""

    prefix: str
    whole_object: str
    chunk_object: str
    is_chat: bool

    def whole(self, head: dict[str, Any], generating: Generating | Replay, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A complete answer, of all its pieces."""
        texts, scored = [[[] for _ in generating.choices] for _ in range(2)]  # type: ignore[var-annotated]
        for piece in pieces:
            texts[piece.number].append(piece.text)
            scored[piece.number] += piece.scored
        choices = [
            {
                "index": choice.number,
                **self._said("".join(texts[choice.number])),
                "logprobs": self._logprobs(scored[choice.number]),
                "finish_reason": choice.finish,
            }
            for choice in generating.choices
        ]
        usage = usage_of(generating.prompt_tokens, generating.completion_tokens)
        return {**head, "object": self.whole_object, "choices": choices, "usage": usage}

    def head(self, head: dict[str, Any]) -> str:
        """The beginning of each chunk, up to its choices: JSON without its end."""
        return json.dumps({**head, "object": self.chunk_object})[:-1] + ',"choices":['

    def chunk(self, piece: Piece) -> str:
        """One choice of a chunk. It is written by hand: a server writes one for each token."""
        text = json.dumps(piece.text)
        finish = "null" if piece.finish is None else f'"{piece.finish}"'
        said = f'"text":{text}'
        if self.is_chat:
            said = '"delta":{' + (f'"content":{text}' if piece.text else "") + "}"
        logprobs = "null" if not piece.scored else json.dumps(self._logprobs(piece.scored))
        return f'{{"index":{piece.number},{said},"logprobs":{logprobs},"finish_reason":{finish}}}'

    def opening(self, number: int) -> str:
        """What a choice of a chat begins with."""
        delta = '"delta":{"role":"assistant","content":""}'
        return f'{{"index":{number},{delta},"logprobs":null,"finish_reason":null}}'

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if not scored:
            return None
        return of_chat(scored) if self.is_chat else of_completion(scored)

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}


TEXT = Form("cmpl", "text_completion", "text_completion", is_chat=False)
CHAT = Form("chatcmpl", "chat.completion", "chat.completion.chunk", is_chat=True)


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
        self._is_over = False  # its last event was given to the connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._generating.left_s):
                await self._send_all(send)
        except TimeoutError:
            # A client that does not read is not told: an answer that is cut off closes its connection.
            if not self._is_over:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_S):
                        await self._send_error(send, took_too_long())
        finally:
            self._generating.close()

    async def _send_all(self, send: Send) -> None:
        async def event(text: str, last: bytes = b"") -> None:
            await send({"type": "http.response.body", "body": text.encode() + last, "more_body": True})

        await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *self._more]})
        if self._form.is_chat:
            openings = (self._form.opening(choice.number) for choice in self._generating.choices)
            await event("".join(self._event(opening, 0) for opening in openings))
        try:
            await event(self._of(self._first))
            async for step in self._steps:
                await event(self._of(step))
            self._is_over = True
            await event(self._usage(), DONE)
        except ApiError as error:
            await self._send_error(send, error)
        else:
            await send(END)

    async def _send_error(self, send: Send, error: ApiError) -> None:
        self._is_over = True
        event = f"data: {json.dumps(error.body())}\n\n".encode()
        await send({"type": "http.response.body", "body": event + DONE, "more_body": True})
        await send(END)

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
