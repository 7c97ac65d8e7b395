"""What stands before and behind an application of Ray Serve: in its proxy's process, and in each replica's."""

from __future__ import annotations

import json
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eet_lab.serving.errors import ApiError
from eet_lab.serving.gate import answer

PATH = "eet_lab.serving.ray_asgi.middlewares"
"""The name under which Ray's proxy imports `middlewares`."""
ID = b"x-request-id"
CODES = {404: "not_found", 408: "timeout", 429: "too_many_requests", 503: "unavailable"}


def within_serve(app: ASGIApp) -> ASGIApp:
    """The same application as Ray Serve expects one: it answers the events of a lifespan, and leaves the request's id
    to Serve's proxy, which has given the application that very id, and adds it to answers itself.
    """

    async def within(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name.lower() != ID]
                message = {**message, "headers": headers}
            await send(message)

        if scope["type"] == "lifespan":
            await _live(receive, send)
        else:
            await app(scope, receive, send_without_id)

    return within


async def _live(receive: Receive, send: Send) -> None:
    event = ""
    while event != "lifespan.shutdown":
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})


def middlewares() -> list[Any]:
    """What Ray's proxy puts around itself (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH)."""
    from starlette.middleware import Middleware

    return [Middleware(OpenAIErrors)]


class OpenAIErrors:
    """Errors that the proxy makes itself, in OpenAI's shape, as a replica's own already are.

    Of a replica that is lost, the proxy says nothing: it sends no answer, or ends one in the middle. Its words for
    other errors are plain text (ray/serve/_private/proxy.py, Ray 2.60).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = [*scope["headers"]]
        if (number := dict(headers).get(ID)) is None:
            number = uuid.uuid4().hex.encode()  # which the proxy and the replica take over
            headers.append((ID, number))
        exchange = _Exchange(number, send)
        try:
            await self._app({**scope, "headers": headers}, receive, exchange.pass_on)
        finally:
            await exchange.finish()


class _Exchange:
    """One answer on its way out of the proxy."""

    def __init__(self, number: bytes, send: Send) -> None:
        self._number, self._send = number, send
        self._status, self._headers = 0, dict[bytes, bytes]()
        self._said: list[bytes] | None = None  # the proxy's own words for an error
        self._is_complete = False

    async def pass_on(self, message: Message) -> None:
        """Send it on, unless the proxy says it in its own words."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(map(tuple, message["headers"]))
            if self._status >= 400 and self._is_of(b"text/plain"):
                self._said = []
        elif self._said is not None:
            self._said.append(message.get("body", b""))
        else:
            self._is_complete = not message.get("more_body", False)
        if self._said is None:
            await self._send(message)

    async def finish(self) -> None:
        """Nothing more comes: say what is wrong, if it was not said in OpenAI's shape."""
        number = self._number.decode(errors="replace")
        lost = ApiError(500, "The replica is lost, and this request with it. Send it again.", code=number)
        if self._said is not None:
            said, code = b"".join(self._said).decode(errors="replace"), CODES.get(self._status)
            retry = self._headers.get(b"retry-after")
            await answer(self._send_with_id, ApiError(self._status, said, None, code, float(retry) if retry else None))
        elif not self._status:
            await answer(self._send_with_id, lost)
        elif not self._is_complete and self._is_of(b"text/event-stream"):
            event = f"data: {json.dumps(lost.body())}\n\ndata: [DONE]\n\n"
            await self._send({"type": "http.response.body", "body": event.encode()})

    def _is_of(self, kind: bytes) -> bool:
        return self._headers.get(b"content-type", b"").startswith(kind)

    async def _send_with_id(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (ID, self._number)]
        await self._send(message)
