"""serve: a model behind HTTP, from a notebook or the command line."""

from __future__ import annotations

import asyncio
import html
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from eet_lab.errors import SetupError
from eet_lab.models import Model
from eet_lab.models.on_device import checked_model
from eet_lab.serving.options import Options
from eet_lab.texts import RecipeLike

if TYPE_CHECKING:
    from eet_lab.serving.server import Server

HOST = "127.0.0.1"
PATIENCE_S = 15.0
"""Seconds beyond the drain for a server to end."""


class Served:
    """A server that runs in this process. `url` is where it is; OpenAI's clients take `base_url=f"{url}/v1"`."""

    def __init__(self, server: Server, url: str) -> None:
        self._server, self.url = server, url
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eet-http", daemon=True)
        self._thread.start()

    def wait_until_up(self, timeout_s: float | None = None) -> Served:
        """Itself, once requests are answered. Errors: what kept it from that; SetupError after the time."""
        ready = self._server.service.worker.ready
        ready.result(timeout_s)
        if not self._server.is_up.wait(timeout_s):
            raise self._error or SetupError(f"The server is {self.state}, and not up after {timeout_s} s.")
        return self

    def stop(self) -> None:
        """Finish what was accepted, refuse the rest, and end. A second call does nothing."""
        while not self._has_ended.is_set() and not self._server.drain_soon():
            self._has_ended.wait(0.01)
        self._thread.join(self._server.service.options.drain_s + PATIENCE_S)

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
        return f"<{service.name} ({service.recipe}) at {self.url}, {self.state}>"

    def _repr_html_(self) -> str:
        """The same for a notebook, with a link."""
        service, url = self._server.service, html.escape(self.url)
        what = html.escape(f"{service.name} ({service.recipe})")
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


def serve(model: Model, recipe: RecipeLike | None = None, *, host: str = HOST, port: int = 0, **options: Any) -> Served:
    """Serve a model with OpenAI's interface, in this process, and return at once a handle with `url` and `stop()`.

    `recipe` is "all,continuous_batching" for a model that generates, and "all" for an encoder. `port` 0 is any free
    one. `options` are the fields of `eet_lab.serving.options.Options`, such as max_queued_requests and api_key. The
    first request waits until the engine is built.
    Errors: SetupError for an option or a port that cannot be; RecipeError; ModelError.
    """
    return Served(*serving(model, recipe, host, port, options))


def serving(
    model: Model, recipe: RecipeLike | None, host: str, port: int, options: Mapping[str, Any]
) -> tuple[Server, str]:
    """A server that listens and does not run yet, and its URL. Errors: those of `serve`."""
    try:
        from eet_lab.serving.server import Server, listen, url_of
        from eet_lab.serving.service import Service
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("eet_lab"):
            raise
        raise SetupError(
            f"{error.name} is not installed, which serving needs: pip install 'eet-lab[serve]'."
        ) from error
    service = Service(checked_model(model), recipe, Options.of(**options))
    listening = listen(host, port)
    return Server(service, listening), url_of(listening)


def run_server(server: Server, started: Callable[[], None]) -> None:
    """Run it on this thread, the main one, until a signal ends it. `started` is called once signals do so."""

    async def run() -> None:
        server.drain_on_signals()
        started()
        await server.run()

    with suppress(asyncio.CancelledError):  # a signal before it was up
        asyncio.run(run())
