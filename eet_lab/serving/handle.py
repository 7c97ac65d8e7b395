"""serve: a model behind HTTP, from a notebook or the command line."""

from __future__ import annotations

import asyncio
import html
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from eet_lab.collector import no_collection
from eet_lab.errors import SetupError
from eet_lab.imports import check_installed
from eet_lab.models import Model
from eet_lab.models.on_device import checked_model
from eet_lab.paths import install_command
from eet_lab.progress import Progress
from eet_lab.serving.options import Options
from eet_lab.texts import RecipeLike
from eet_lab.words import told

if TYPE_CHECKING:
    from eet_lab.serving.lifecycle import Lifecycle

HOST = "127.0.0.1"
PATIENCE_S = 15.0
"""Seconds beyond the drain for a server to end."""
LOOK_S = 0.05
"""How often whoever waits for a server looks whether it has failed."""
PACKAGES = ("fastapi", "httptools", "prometheus_client", "pydantic", "starlette", "uvicorn")
FRONTS = ("process", "thread")


class ServerHandle:
    """A server of a model of this process. `url` is where it is; OpenAI's clients take `base_url=f"{url}/v1"`."""

    def __init__(self, server: Lifecycle, url: str) -> None:
        self._server, self.url = server, url
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eet-http", daemon=True)
        self._thread.start()

    def wait_until_up(self, timeout_s: float | None = None) -> ServerHandle:
        """Itself, once requests are answered. Errors: what kept it from that; SetupError after the time."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._server.is_up.wait(LOOK_S):
            if self._has_ended.is_set():
                raise self._error or SetupError("The server is stopped. Serve the model again.")
            if time.monotonic() > end:
                raise SetupError(f"The server is {self.state}, and not up after {timeout_s} s. Wait longer.")
        return self

    def stop(self) -> None:
        """Finish what was accepted, refuse the rest, and end. A second call does nothing."""
        while not self._has_ended.is_set() and not self._server.drain_soon():
            self._has_ended.wait(0.01)
        self._thread.join(self._server.service.options.drain_s + PATIENCE_S)

    def __enter__(self) -> ServerHandle:
        """Itself, for a block at whose end it stops."""
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def reset_prefix_cache(self) -> None:
        """Let requests from now on find nothing that `prefix_caching` kept of those before, and count them anew."""
        from eet_lab.serving.generator import Generator

        generator = self._server.service.generator
        if isinstance(generator, Generator):  # an encoder's server has none
            generator.reset_prefix_cache()

    @property
    def state(self) -> str:
        """ "starting", "serving", "stopped", or "failed" with the reason."""
        if self._error is not None:
            return f"failed: {self._error}"
        if self._has_ended.is_set():
            return "stopped"
        return "serving" if self._server.is_up.is_set() else "starting"

    def __repr__(self) -> str:
        service = self._server.service
        return f"<{service.card.name} ({service.card.recipe}) at {self.url}, {self.state}, front {self._server.place}>"

    def _repr_html_(self) -> str:
        """The same for a notebook, with a link."""
        service, url = self._server.service, html.escape(self.url)
        what = html.escape(f"{service.card.name} ({service.card.recipe})")
        return f'{what} at <a href="{url}/v1/models">{url}</a>, {html.escape(self.state)}'

    def _run(self) -> None:
        try:
            asyncio.run(self._server.run())
        except asyncio.CancelledError:
            pass  # stopped before it was up
        except BaseException as error:  # noqa: BLE001  shown by `state`, raised by `wait_until_up`
            self._error = error
        finally:
            self._has_ended.set()


def serve(
    model: Model,
    recipe: RecipeLike | None = None,
    *,
    host: str = HOST,
    port: int = 0,
    front: str | None = None,
    **options: Any,
) -> ServerHandle:
    """Serve a model of this process with OpenAI's interface, and return at once a handle with `url` and `stop()`.

    `recipe` is "all,continuous_batching" for a model that generates, and "all" for an encoder. `port` 0 is any free
    one. `front` is where HTTP, JSON and texts are worked at: "process", one beside this, or "thread", in this one,
    where it and the engine take turns at the interpreter's lock. None: a process wherever there can be one, which is
    for models that generate, with a tokenizer of `tokenizers` or none. `options` are the fields of
    `eet_lab.serving.options.Options`, such as max_queued_requests and api_key. The first request waits until the
    engine is built.
    Errors: SetupError for an option, a front or a port that cannot be; RecipeError; ModelError.
    """
    return ServerHandle(*serving(model, recipe, host, port, options, front))


def serving(
    model: Model,
    recipe: RecipeLike | None,
    host: str,
    port: int,
    options: Mapping[str, Any],
    front: str | None = None,
    progress: Progress | None = None,
) -> tuple[Lifecycle, str]:
    """A server that listens and does not run yet, and its URL. `progress` is told of kernels that are built, on the
    engine's thread. Errors: those of `serve`.
    """
    check_installed(PACKAGES, "serving needs", install_command("serve"))
    with no_collection():
        from eet_lab.serving.lifecycle import listen, url_of
        from eet_lab.serving.service import LocalFront, Service

    if front is not None and front not in FRONTS:
        raise SetupError(f"front is {told(front)}, but it must be 'process', 'thread', or None: whichever can be.")
    service = Service(checked_model(model), recipe, Options.of(**options))
    service.worker.progress = progress
    why_not = service.card.why_not_sent()
    if front == "process" and why_not:
        raise SetupError(f"front is 'process', but {why_not} Say front='thread'.")
    listening = listen(host, port)
    url = url_of(listening)
    if front != "thread" and not why_not:
        from eet_lab.serving.split_server import SplitServer

        return SplitServer(service, listening), url
    from eet_lab.serving.server import Server  # with uvicorn and FastAPI, which the other has in its front

    return Server(LocalFront(service), listening), url


def run_server(server: Lifecycle, started: Callable[[], None]) -> None:
    """Run it on this thread, the main one, until a signal ends it. `started` is called once signals do so."""

    async def run() -> None:
        server.drain_on_signals()
        server.has_process = True
        started()
        await server.run()

    with suppress(asyncio.CancelledError):  # a signal before it was up
        asyncio.run(run())
