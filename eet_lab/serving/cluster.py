"""Processes of Ray Serve."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from eet_lab import ray_here
from eet_lab.errors import SetupError
from eet_lab.ray_here import LOGS
from eet_lab.serving.ray_asgi import PATH
from eet_lab.threads import num_cores
from eet_lab.words import counted

if TYPE_CHECKING:
    from eet_lab.serving.replica import ReplicaArgs

RESOURCES = {"cuda": "GPU", "cpu": "CPU"}
"""What one replica takes one of, by its device."""
SETTINGS = ray_here.SETTINGS | {
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": PATH,
}
"""A cluster that is started here has them besides: what Serve says goes to its logs, and its proxy's errors have
OpenAI's shape.
"""
APP = "eet_lab"
CONTROLLER = "SERVE_CONTROLLER_ACTOR"
HEALTH_S = 1.0
"""How often a replica is asked for its health. After three failures another one takes its place."""
ASK_S = 10.0
"""The time for replicas to answer what they are asked by name."""


class Running:
    """An application of Ray Serve. `is_ours`: the cluster was started for it, and ends with it."""

    def __init__(self, handle: Any, is_ours: bool) -> None:
        self._handle, self._is_ours = handle, is_ours

    def ask(self, method: str) -> list[Any]:
        """What each replica answers. Errors: TimeoutError; Ray's own where one is lost."""
        return self._handle.broadcast(method).results(timeout_s=ASK_S)

    def states(self) -> dict[str, int]:
        """How many replicas are in each of Ray's states, such as RUNNING and STARTING."""
        from ray import serve

        found = Counter[str]()
        for deployment in serve.status().applications[APP].deployments.values():
            found.update({str(getattr(state, "value", state)): n for state, n in deployment.replica_states.items()})
        return dict(found)

    def close(self) -> None:
        """End the processes."""
        _leave(self._is_ours)


def run(args: ReplicaArgs, scale: dict[str, Any], most: int, host: str, port: int) -> tuple[Running, str]:
    """Start replicas, and wait until all answer; and their URL.

    `scale` are the deployment's own options. Errors: SetupError, with a replica's own reason where it did not start.
    """
    from eet_lab.serving.lifecycle import listen, url_of

    with listen(host, port) as listening:  # only to find a port, and what keeps it from being listened on
        url, port = url_of(listening), listening.getsockname()[1]
    is_ours = _join(args.device, most)
    from ray import serve

    quiet = {"log_level": "WARNING", "enable_access_log": False}
    with ExitStack() as undo:
        undo.callback(_leave, is_ours)
        serve.start(http_options={"host": host, "port": port}, logging_config=quiet)
        try:
            handle = serve.run(_application(args, scale), name=APP, route_prefix="/", logging_config=quiet)
        except RuntimeError as error:  # it says that it failed, and not why
            raise SetupError(f"The replicas did not start: {_reason() or error} Ray's logs are in {LOGS}.") from error
        undo.pop_all()
    return Running(handle, is_ours), url


def _join(device: str, most: int) -> bool:
    """Be part of a cluster that has room; whether it was started for this."""
    if not ray_here.is_named():
        import torch

        check_room(device, most, torch.cuda.device_count() if device == "cuda" else num_cores())
        ray_here.start(SETTINGS)
        return True
    ray_here.join()
    import ray
    from ray.util import list_named_actors

    check_room(device, most, int(ray.cluster_resources().get(RESOURCES[device], 0)))
    if any(each["name"] == CONTROLLER for each in list_named_actors(all_namespaces=True)):
        raise SetupError(
            "Ray Serve runs on this cluster already. End it first: stop() of its handle, or serve shutdown."
        )
    return False


def _leave(is_ours: bool) -> None:
    import ray
    from ray import serve

    serve.shutdown()
    if is_ours:
        ray.shutdown()


def check_room(device: str, most: int, have: int) -> None:
    """Errors: SetupError for more replicas than there are GPUs, or CPUs, to give each one."""
    if most > have:
        what = RESOURCES[device]
        instead = f"at most {have:,}" if have else "device='cpu'"
        raise SetupError(
            f"replicas is {most:,}, but each takes a {what}, and there {'is' if have == 1 else 'are'} "
            f"{counted(have, what)} here. Ask for {instead}."
        )


def _application(args: ReplicaArgs, scale: dict[str, Any]) -> Any:
    from ray import serve

    from eet_lab.serving.replica import Replica

    options = args.options
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=APP,
        ray_actor_options={"num_cpus": 0, f"num_{RESOURCES[args.device].lower()}s": 1},
        health_check_period_s=HEALTH_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=options.drain_s,
        max_constructor_retry_count=1,
        **scale,
    )
    return deployment.bind(args)


def _reason() -> str:
    """The last line of what a replica said that did not start."""
    from ray import serve

    for app in serve.status().applications.values():
        for deployment in app.deployments.values():
            if errors := re.findall(r"(?m)^(?:[\w.]+\.)?(\w*(?:Error|Memory)): (.+)$", deployment.message):
                kind, text = errors[-1]
                return f"{kind}: {text}"
    return ""
