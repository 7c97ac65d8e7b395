"""Processes of Ray Serve."""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from eet_lab import ray_here
from eet_lab.errors import SetupError
from eet_lab.ray_here import LOGS
from eet_lab.serving.ray_asgi import PATH
from eet_lab.threads import num_cores
from eet_lab.words import counted

if TYPE_CHECKING:
    from eet_lab.serving.fronts import Fronts
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
LOOK_S = 0.05
"""How often replicas that drain are asked whether all are done."""
HERE = "127.0.0.1"


class Running:
    """An application of Ray Serve. `is_ours`: the cluster was started for it, and ends with it.

    `fronts` answer its clients; None: Ray's proxy does.
    """

    def __init__(self, handle: Any, is_ours: bool, fronts: Fronts | None = None) -> None:
        self._handle, self._is_ours, self._fronts = handle, is_ours, fronts

    def check(self) -> None:
        """Errors: SetupError once clients are not answered any more as they should be."""
        if self._fronts is not None:
            self._fronts.check()

    def drain(self, drain_s: float) -> None:
        """Finish what was accepted within this time, and refuse the rest. Errors: those of `ask`."""
        if self._fronts is not None:
            self._fronts.drain(drain_s)
            return
        end = time.monotonic() + drain_s
        while sum(self.ask("drain")):
            if time.monotonic() > end:
                self.ask("end_all")
                return
            time.sleep(LOOK_S)

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
        try:
            if self._fronts is not None:
                self._fronts.close()
        finally:  # Ctrl+C ends the waiting for fronts, and leaves no replica on a GPU
            _leave(self._is_ours)


def run(args: ReplicaArgs, scale: dict[str, Any], most: int, host: str, port: int) -> tuple[Running, str]:
    """Start replicas, and wait until all answer; and their URL.

    `scale` are the deployment's own options. Errors: SetupError, with a replica's own reason where it did not start.
    """
    from eet_lab.serving.fronts import Fronts, num_fronts
    from eet_lab.serving.lifecycle import listen, url_of

    with listen(host, port) as listening:  # only to find a port, and what keeps it from being listened on alone
        url, found = url_of(listening), listening.getsockname()[1]
    is_ours = _join(args.device, most)
    from ray import serve

    quiet = {"log_level": "WARNING", "enable_access_log": False}
    with ExitStack() as undo:
        undo.callback(_leave, is_ours)
        fronts, http = None, dict[str, Any](host=host, port=found)
        if args.has_fronts:
            # With the port that was asked for: one that was free may be Ray's by now.
            fronts = Fronts(host, port, num_fronts(most), HERE if is_ours else _address())
            undo.callback(fronts.close)
            url, http["port"] = fronts.url, fronts.port
            args = replace(args, reach=fronts.reach)
            # It listens nowhere, and yet Ray says that address on the terminal.
            serve.start(proxy_location="Disabled", http_options=http, logging_config=quiet)
        else:
            serve.start(http_options=http, logging_config=quiet)
        try:
            handle = serve.run(_application(args, scale), name=APP, route_prefix="/", logging_config=quiet)
        except RuntimeError as error:  # it says that it failed, and not why
            raise SetupError(f"The replicas did not start: {_reason() or error} Ray's logs are in {LOGS}.") from error
        undo.pop_all()
    return Running(handle, is_ours, fronts), url


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


def _address() -> str:
    """Where other machines of the cluster find this one."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


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

    from eet_lab.serving.replica import EngineReplica, Replica

    options = args.options
    deployment = serve.deployment(
        EngineReplica if args.has_fronts else serve.ingress()(Replica),
        name=APP,
        ray_actor_options={"num_cpus": 0, f"num_{RESOURCES[args.device].lower()}s": 1},
        health_check_period_s=HEALTH_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=options.drain_s,
        max_constructor_retry_count=1,
        **scale,
    )
    return deployment.bind(args)


def replicas_wanted(context: Any) -> tuple[float, dict[str, Any]]:
    """Ray's policy of autoscaling, with the jobs inside the engines in place of the requests that Ray itself sees.

    Ray applies bounds and delays to what this wants, and gives the means of the last 30 s (look_back_period_s).
    """
    from eet_lab.serving.replica import INSIDE

    inside = sum(context.aggregated_metrics.get(INSIDE, {}).values())
    return inside / context.config.get_target_ongoing_requests(), {}


def _reason() -> str:
    """The last line of what a replica said that did not start."""
    from ray import serve

    for app in serve.status().applications.values():
        for deployment in app.deployments.values():
            if errors := re.findall(r"(?m)^(?:[\w.]+\.)?(\w*(?:Error|Memory)): (.+)$", deployment.message):
                kind, text = errors[-1]
                return f"{kind}: {text}"
    return ""
