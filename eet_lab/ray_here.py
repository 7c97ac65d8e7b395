"""Ray, where it is installed: what its processes are told, and a cluster of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from eet_lab import imports
from eet_lab.errors import SetupError
from eet_lab.paths import install_command
from eet_lab.threads import num_cores

SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
"""A cluster that is started here has them: nothing is reported to anybody, and Ray's own ports, which listen on every
interface, take only who has the token of ~/.ray.
"""
LOGS = "/tmp/ray/session_latest/logs"


def check_installed(names: Sequence[str], who: str) -> None:
    """Errors: SetupError where one of these packages of the extra `ray` is missing, which `who` need."""
    imports.check_installed(names, f"{who} need", install_command("ray"))


def is_joined() -> bool:
    """Whether this process is part of a cluster. It does not import Ray: settings must come before that."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def is_named() -> bool:
    """Whether there is a cluster to be part of: this process is, or RAY_ADDRESS says where one is."""
    return "RAY_ADDRESS" in os.environ or is_joined()


def join() -> None:
    """Be part of the cluster that is named. Errors: SetupError."""
    import ray

    try:
        ray.init(ignore_reinit_error=True, log_to_driver=False)
    except Exception as error:
        raise SetupError(
            f"The Ray cluster at {os.environ.get('RAY_ADDRESS')} cannot be joined: {error} Start it, correct "
            "RAY_ADDRESS, or unset it: then a cluster of this machine is started."
        ) from error


def start(settings: Mapping[str, str] = SETTINGS) -> None:
    """A cluster of this process, which ends with it. Errors: SetupError.

    Ray gives its own processes 15 s to be there, which a machine with too much to do may not manage at once.
    """
    # Ray reads them when it is imported, so they must come first.
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    import ray

    for is_last in (False, True):
        try:
            ray.init(
                address="local", num_cpus=num_cores(), include_dashboard=False, log_to_driver=False,
                logging_level="WARNING",
            )  # fmt: skip
            return
        except Exception as error:
            ray.shutdown()
            if is_last:
                raise SetupError(
                    f"Ray's processes did not start: {error} Where this machine has much else to do, try again when it "
                    f"has less. Ray's logs are in {LOGS}."
                ) from error


def stop() -> None:
    """End the cluster of this process, or leave the one that it joined, if there is one."""
    ray = sys.modules.get("ray")
    if ray is not None:
        ray.shutdown()
