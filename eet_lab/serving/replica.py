"""What runs in each process of Ray Serve: an engine for fronts, or the plain server's whole application."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar

from starlette.types import ASGIApp

from eet_lab.collector import freeze_heap
from eet_lab.models import load
from eet_lab.serving.app import app_of
from eet_lab.serving.errors import ApiError
from eet_lab.serving.links import Links
from eet_lab.serving.options import Options
from eet_lab.serving.ray_asgi import within_serve
from eet_lab.serving.reach import Reach
from eet_lab.serving.server import SWITCH_S
from eet_lab.serving.service import LocalFront, Service
from eet_lab.serving.wire import Hello

INSIDE = "inside"
"""The name by which autoscaling knows the jobs of a replica."""


@dataclass(frozen=True)
class ReplicaArgs:
    """What a replica needs to build its engine: names, which any process can read, and no weights.

    `has_fronts`: processes of ours answer clients for it, and `reach` says where; else Ray's proxy brings requests.
    """

    model: str
    recipe: str | None
    device: str
    dtype: str | None
    options: Options
    has_fronts: bool = False
    reach: Reach | None = None


class EngineReplica:
    """One engine, which takes jobs of fronts. Its methods are called on the replica's loop by Ray Serve.

    Ray kills a replica whose `check_health` fails, and starts another in its place.
    """

    async def __init__(self, args: ReplicaArgs) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        model = await asyncio.to_thread(load, args.model, device=args.device, dtype=args.dtype)
        service = Service(model, args.recipe, args.options)
        assert service.generator is not None and args.reach is not None
        self.generator = service.generator
        self._links = Links(self.generator)
        self.generator.start()
        await asyncio.wrap_future(self.generator.ready)
        freeze_heap()
        await self._links.open(args.reach, Hello(service.card, args.options))
        self._has_left = False

    async def check_health(self) -> None:
        """Raise the reason once the engine is lost, or a front cannot reach it."""
        if (error := self.generator.dead or self._links.error) is not None:
            raise error

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What autoscaling asks for: Ray itself sees no requests."""
        return {INSIDE: self._links.num_inside}

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """How Ray Serve ends a replica that is too many: it awaits this, and kills the process after `drain_s`."""
        if getattr(self, "_has_left", True):
            return None
        self._has_left = True
        return self._links.leave()


class ReplicaFront(LocalFront):
    """A front whose events go to clients through Ray, and through the one proxy that all replicas have."""

    per_answer_s: ClassVar[float] = 0.002
    """An event took 0.8 ms of the proxy's thread and 0.7 of this process, on two busy cores. So the tokens of many
    streams must go together, or the proxy would bound all replicas: of this many events it can pass on those of a few.
    First tokens and ends wait for none of it.
    """


class Replica:
    """One engine and its application, where no front can be in another process.

    Its public methods are called on the replica's loop, by Ray Serve or by name.
    Ray kills a replica whose `check_health` fails, and starts another in its place.
    """

    async def __init__(self, args: ReplicaArgs) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        model = await asyncio.to_thread(load, args.model, device=args.device, dtype=args.dtype)
        self.service = ReplicaFront(Service(model, args.recipe, args.options))
        worker = self.service.worker
        worker.serve(asyncio.get_running_loop())
        worker.start()
        await asyncio.wrap_future(worker.ready)
        sys.setswitchinterval(SWITCH_S)
        freeze_heap()

    def __serve_build_asgi_app__(self) -> ASGIApp:
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
