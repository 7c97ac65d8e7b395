"""What every request passes first, before a byte of its body is read: its id, the key, and the bounds on what waits."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import secrets
import time
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eet_lab.serving.errors import ApiError, took_too_long
from eet_lab.serving.metrics import Metrics
from eet_lab.serving.options import BYTES_PER_TOKEN, Options
from eet_lab.words import plain, sized, told

Result = TypeVar("Result")

OPEN = "/health"
FINE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
NUMBERS = random.Random()
"""Draws ids and seeds, which are no secrets. The system's source would give Python's lock to the engine's thread."""
SMOOTHING = 0.1
"""The weight of the newest wait in the mean."""
LOG = logging.getLogger("eet_lab.serving")


class Gate:
    """An ASGI app in front of another.

    It leaves in the scope's state the `request_id`, which is the client's x-request-id where it sent a fine one, and
    the `ticket` of whoever asks the model for something. Where a protocol has answered in the app's place, and counted
    that, it has set `is_refused` there.
    """

    def __init__(self, app: ASGIApp, options: Options, admission: Admission, metrics: Metrics) -> None:
        self._app, self._options, self._admission, self._metrics = app, options, admission, metrics
        self._key = options.api_key.encode() if options.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if FINE_ID.fullmatch(given) else new_id()
        state = scope.setdefault("state", {})
        state["request_id"], state["ticket"] = request_id.decode(), None
        has_begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                if message["status"] >= 400 and not state.get("is_refused"):
                    self._metrics.refused[message["status"]] += 1
            await send(message)

        try:
            self._check_key(scope, headers)
            if scope["method"] == "POST":
                num_bytes = self._checked_length(headers)
                state["ticket"] = self._admission.enter(num_bytes, time.perf_counter())
            await self._app(scope, receive, send_with_id)
        except ApiError as error:
            await answer(send_with_id, error)
        except Exception as error:  # the client is told, and the server goes on
            LOG.error("%s failed", request_id.decode(), exc_info=error)
            if has_begun:
                raise
            await answer(
                send_with_id, ApiError(500, "The server failed. Its log has the reason.", code=state["request_id"])
            )
        finally:
            if state["ticket"] is not None:
                state["ticket"].left()

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self._key is None or scope["path"] == OPEN:
            return
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not secrets.compare_digest(key.strip(), self._key):
            raise ApiError(
                401, "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'.", code="invalid_api_key"
            )

    def _checked_length(self, headers: dict[bytes, bytes]) -> int:
        """The bytes of a body as its headers tell them; 0 where they do not."""
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # a page of another site can send every other type without being asked
            raise ApiError(415, f"The body's type is {told(kind.decode('latin-1'))}, but it must be application/json.")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "The body is compressed. Send it as it is.")
        length = int(headers.get(b"content-length", b"0"))  # the protocol has checked that it is a number
        if length > self._options.max_body_bytes:
            raise self.too_large(f"The body has {length:,} bytes", self._options)
        return length

    @staticmethod
    def too_large(what: str, options: Options) -> ApiError:
        """413 for a body that is longer than the limit."""
        most = options.max_body_bytes
        return ApiError(413, f"{what}, but at most {sized(most)} are read (max_body_bytes). Send less at a time.")


async def read_body(receive: Receive, options: Options) -> bytes:
    """A request's body. Errors: ApiError: 413 too long, 408 too slow, 499 the client left."""
    parts, length = list[bytes](), 0
    try:
        async with asyncio.timeout(options.body_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(499, "The client left before its body was complete.")
                parts.append(message.get("body", b""))
                length += len(parts[-1])
                if length > options.max_body_bytes:
                    raise Gate.too_large("The body goes on", options)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise ApiError(408, f"The body took longer than {plain(options.body_s)} s. Send it at once.") from None


async def disconnected(receive: Receive) -> None:
    """Wait until the client has left: once it has sent its body, all that it can still say is that."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def before(end: float, work: Awaitable[Result], receive: Receive) -> Result:
    """Its result. Errors: its own; ApiError, 499 once the client has left, 504 at `end`, by time.perf_counter()."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        both = doing, leaving
        await asyncio.wait(both, timeout=end - time.perf_counter(), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        if leaving.done():
            raise ApiError(499, "The client has left.")
        raise took_too_long()
    finally:
        doing.cancel()
        leaving.cancel()


async def answer(send: Send, error: ApiError) -> None:
    """Send an error as OpenAI does."""
    status, headers, body = written(error)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def written(error: ApiError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Its status, headers and body. JSON in ASCII: a message may quote what no encoding takes."""
    body = json.dumps(error.body()).encode()
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers().items()]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return error.status, headers, body


def new_id() -> bytes:
    """An id for a request that brings none."""
    return b"%032x" % NUMBERS.getrandbits(128)


class Ticket:
    """A request that was let in. It is queued until it is `started`, and inside until it has `left`."""

    def __init__(self, admission: Admission, tokens: int, now: float) -> None:
        self._admission, self._tokens, self.since = admission, tokens, now
        self._requests, self._is_queued, self._is_inside = 1, True, True

    def count(self, requests: int, tokens: int) -> None:
        """What it really is, once its prompts are read: that many requests of an engine, and their tokens."""
        if self._is_queued:
            self._admission.queue(requests - self._requests, tokens - self._tokens)
        self._requests, self._tokens = requests, tokens

    def started(self, now: float) -> None:
        """The first token came `now`: it waits no more."""
        if self._is_queued:
            self._admission.waited(now - self.since)
        self._unqueue()

    def left(self) -> None:
        """The answer is complete, or nobody waits for it."""
        self._unqueue()
        if self._is_inside:
            self._is_inside = False
            self._admission.num_inside -= 1

    def _unqueue(self) -> None:
        if self._is_queued:
            self._is_queued = False
            self._admission.queue(-self._requests, -self._tokens)


class Admission:
    """Counts what is queued and inside. All calls come from the server's loop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.num_queued = self.queued_tokens = self.num_inside = 0
        self.is_draining = False
        self.share = 1.0
        """Of an engine's bounds, what is let in here: there may be several engines, and several gates."""
        self._mean_wait_s = 0.0

    def enter(self, num_bytes: int, now: float) -> Ticket:
        """Let in a request whose body has so many bytes. Errors: ApiError, 503 while draining, 429 where it is full.

        One that finds room comes in however long it is: its own limit is the model's context.
        """
        if self.is_draining:
            raise ApiError(503, "The server is shutting down and takes no more requests.", code="shutting_down")
        limits = (
            ("requests", self.num_queued, self._options.max_queued_requests),
            ("tokens", self.queued_tokens, self._options.max_queued_tokens),
        )
        for name, queued, bound in limits:
            most = max(1, int(bound * self.share))
            if queued >= most:
                raise ApiError(
                    429,
                    f"The queue is full: {queued:,} {name} wait, and at most {most:,} may (max_queued_{name}). Send "
                    "this again later.",
                    code=f"too_many_queued_{name}",
                    retry_after_s=min(self._mean_wait_s, 60),
                )
        tokens = num_bytes // BYTES_PER_TOKEN
        self.queue(1, tokens)
        self.num_inside += 1
        return Ticket(self, tokens, now)

    def queue(self, requests: int, tokens: int) -> None:
        """So many more are queued; negative: fewer."""
        self.num_queued += requests
        self.queued_tokens += tokens

    def waited(self, seconds: float) -> None:
        """Another request has waited so long for its first token."""
        self._mean_wait_s += SMOOTHING * (seconds - self._mean_wait_s)
