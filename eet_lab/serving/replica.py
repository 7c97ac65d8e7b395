"""What runs in each process of Ray Serve: the plain server's application, over an engine of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from eet_lab.models import load
from eet_lab.serving.app import app_of
from eet_lab.serving.errors import ApiError
from eet_lab.serving.options import Options
from eet_lab.serving.server import SWITCH_S
from eet_lab.serving.service import Service

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Plan:
    """What a replica needs to build its engine: names, which any process can read, and no weights."""

    model: str
    recipe: str | None
    device: str
    dtype: str | None
    options: Options


class Replica:
    """One engine and its application. Its public methods are called on the replica's loop, by Ray Serve or by name.

    Ray kills a replica whose `check_health` fails, and starts another in its place.
    """

    async def __init__(self, plan: Plan) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        model = await asyncio.to_thread(load, plan.model, device=plan.device, dtype=plan.dtype)
        self.service = Service(model, plan.recipe, plan.options)
        worker = self.service.worker
        worker.serve(asyncio.get_running_loop())
        worker.start()
        await asyncio.wrap_future(worker.ready)
        sys.setswitchinterval(SWITCH_S)

    def __serve_build_asgi_app__(self) -> App:
        """The name by which Ray Serve asks for an application once there is a replica."""
        return within_serve(app_of(self.service))

    async def check_health(self) -> None:
        """Raise the reason once the engine is lost, as /health does."""
        if self.service.worker.dead is not None:
            raise self.service.worker.dead

    async def drain(self) -> int:
        """Refuse what comes from now on; how many that were accepted are still inside."""
        self.service.admission.is_draining = True
        return self.service.admission.num_inside

    async def end_all(self) -> None:
        """Tell all that are still inside that nobody waits for them any longer."""
        self.service.end_all(ApiError(503, "The server shuts down and waits no longer.", code="shutting_down"))


def within_serve(app: App) -> App:
    """The same application as Ray Serve expects one: it answers the events of a lifespan, and leaves the request's id
    to Serve's proxy, which has given the application that very id, and adds it to answers itself.
    """

    async def within(scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name.lower() != b"x-request-id"]
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
