"""serve_replicas: one model by several processes, a GPU each, behind one address; Ray Serve places them."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from eet_lab import ray_here
from eet_lab.devices import default_device
from eet_lab.errors import SetupError
from eet_lab.models import Model, load
from eet_lab.scheduling.whole import MOST, check_whole
from eet_lab.serving import cluster
from eet_lab.serving.handle import HOST
from eet_lab.serving.options import Options
from eet_lab.texts import RecipeLike
from eet_lab.words import counted, told, type_of

TARGET = 32
"""Requests inside a replica at which autoscaling wants another one."""
POLICY = "eet_lab.serving.cluster:replicas_wanted"
"""The name under which Ray Serve's controller imports the policy."""
SPARE = 4096
"""Answers that are on their way to clients, beyond those that a replica's own bounds count. Only above all of them
does Ray's proxy queue requests, where nothing says 429.
"""


class ServedReplicas:
    """Replicas that serve `what`. `url` is where they are; OpenAI's clients take `base_url=f"{url}/v1"`."""

    def __init__(self, what: str, url: str, drain_s: float, running: cluster.Running) -> None:
        self.what, self.url, self._drain_s = what, url, drain_s
        self._running: cluster.Running | None = running

    @property
    def state(self) -> str:
        """ "serving", with the number of replicas in each of Ray's states, "stopped", or "failed" with the reason."""
        if self._running is None:
            return "stopped"
        try:
            self._running.check()
        except SetupError as error:
            return f"failed: {error}"
        states = self._running.states()
        return f"serving ({', '.join(f'{count} {state.lower()}' for state, count in sorted(states.items()))})"

    def check(self) -> None:
        """Errors: SetupError once clients are not answered any more as they should be: a front has ended."""
        if self._running is not None:
            self._running.check()

    def stop(self) -> None:
        """Finish what was accepted, refuse the rest, and end. A second call does nothing."""
        running, self._running = self._running, None
        if running is None:
            return
        try:
            # A replica may be gone, or there may be none: what is left of them ends all the same.
            with suppress(Exception):
                running.drain(self._drain_s)
        finally:
            running.close()

    def __repr__(self) -> str:
        return f"<{self.what} at {self.url}, {self.state}>"


def serve_replicas(
    model: str | os.PathLike[str],
    recipe: RecipeLike | None = None,
    *,
    replicas: int | tuple[int, int] = 1,
    target_ongoing_requests: int = TARGET,
    device: str | None = None,
    dtype: str | None = None,
    host: str = HOST,
    port: int = 0,
    **options: Any,
) -> ServedReplicas:
    """Serve a model by several replicas, and return a handle with `url` and `stop()` once all of them answer.

    `model` is the name or folder of `eet_lab.load`: each replica loads it by itself, on a GPU of its own, or with
    device="cpu" on a core of its own. `replicas` (fewest, most) follow the load: as many as keep the requests
    inside each near `target_ongoing_requests`. The other arguments are those of `eet_lab.serve`, and the bounds of
    `options` are those of each replica. They are processes of Ray Serve, on a cluster of this machine's own, or on the
    one that ray.init or RAY_ADDRESS names. A replica that dies or whose engine is lost is replaced: what it was
    answering fails, and is never silent. Of requests through fronts, those without a token yet go to another one, once.

    HTTP, JSON and texts are worked at by fronts beside this process, as in `eet_lab.serve`: one for each replica, but
    no more than one for two cores here. Each gives a request to the replica that has the fewest, lets in its share of
    the replicas' bounds, and has a response cache and /metrics of its own: where there are several, /metrics tells of
    whichever was asked. Replicas on other machines connect to this one, at a free port for each front. Where no other
    process can be the front (encoders, tokenizers of transformers), all requests go through Ray's one proxy, which
    reads headers and bodies without the time limits of `eet_lab.serve`; /metrics then tells of one replica, whichever
    was asked, and on a cluster of our own, what the proxy itself refuses has OpenAI's shape too.
    Errors: SetupError, also for what cannot be served; ModelError; RecipeError.
    """
    (least, most), wanted = _least_and_most(replicas), Options.of(**options)
    check_whole(SetupError, "target_ongoing_requests", target_ongoing_requests, 1, MOST)
    ray_here.check_installed(("ray", "fastapi", "prometheus_client", "uvicorn"), "replicas")
    from eet_lab.serving.replica import ReplicaArgs
    from eet_lab.serving.service import card_of, recipe_to_serve

    kind = device or default_device()
    if kind not in cluster.RESOURCES:
        raise SetupError(f"device is {told(device)}, but it must be 'cuda', a GPU for each replica, or 'cpu'.")
    shape = _shape_of(model)
    checked = recipe_to_serve(shape, recipe, kind, wanted)
    name = str(shape.folder.resolve()) if shape.kind == "folder" and shape.folder else str(model)
    has_fronts = not card_of(shape, checked, wanted).why_not_sent()
    args = ReplicaArgs(name, str(checked), kind, dtype, wanted, has_fronts)
    scale: dict[str, Any] = {"num_replicas": least}
    if least != most:
        bounds = {"min_replicas": least, "max_replicas": most, "initial_replicas": least}
        scale = {"autoscaling_config": bounds | {"target_ongoing_requests": target_ongoing_requests}}
        if has_fronts:
            scale["autoscaling_config"]["policy"] = {"policy_function": POLICY}
    if not has_fronts:
        scale["max_ongoing_requests"] = wanted.max_queued_requests + (checked.parts.schedule.max_rows or 0) + SPARE
    running, url = cluster.run(args, scale, most, host, port)
    by = counted(least, "replica") if least == most else f"{least} to {most} replicas"
    return ServedReplicas(f"{wanted.served_model_name or shape.name} ({checked}) by {by}", url, wanted.drain_s, running)


def _least_and_most(replicas: int | tuple[int, int]) -> tuple[int, int]:
    """The fewest replicas and the most, from a number such as 2, or (1, 4). Errors: SetupError."""
    ends: Any = replicas if isinstance(replicas, tuple) and len(replicas) == 2 else (replicas, replicas)
    least, most = ends
    for each in (least, most):
        check_whole(SetupError, "replicas", each, 1, MOST, ", or two of them, the fewest and the most")
    if least > most:
        raise SetupError(f"replicas is from {least} to {most}, but the fewest must come first: ({most}, {least}).")
    return least, most


def _shape_of(model: object) -> Model:
    """The model without its weights. Errors: ModelError, also for a model that is loaded."""
    if isinstance(model, (str, os.PathLike)):
        return load(model, device="meta")
    raise SetupError(
        f"model is {type_of(model)}, but replicas are processes of their own, which a model of this one "
        "cannot reach: give its name or its folder, and each loads it. `Model.save` writes a folder."
    )
