"""A JupyterLab of our own: a free port, a token that no configuration turns off, an end whatever happens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from eet_lab import paths
from eet_lab.errors import SetupError

HOST = "127.0.0.1"
CONFIG = Path(__file__).parent / "config"
SHARE = Path(__file__).parent / "share"
"""Templates of Voila's."""
FIRST_PORT, NUM_PORTS = 8888, 50
START_TIMEOUT_S = 90

Server = subprocess.Popen[bytes]


def choose_port(wanted: int | None = None) -> int:
    """`wanted` if it is free, else SetupError; without a wish, the first free port from 8888."""
    if wanted is not None:
        if not 1 <= wanted <= 65535:
            raise SetupError(f"Port {wanted} does not exist. Use one from 1024 to 65535: eet-lab lab --port 8888")
        if not _is_free(wanted):
            raise SetupError(
                f"Port {wanted} on {HOST} is taken or not permitted, perhaps by an earlier lab "
                "(`jupyter server list`). Leave out --port to get a free one."
            )
        return wanted
    for port in range(FIRST_PORT, FIRST_PORT + NUM_PORTS):
        if _is_free(port):
            return port
    raise SetupError(
        f"Ports {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1} are all taken. "
        "Stop old servers (`jupyter server list`) or name a port: eet-lab lab --port 9000"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def server_words(root: Path, page: str, port: int, token: str, retries: int = 0) -> list[str]:
    """What JupyterLab is told. A word beats the user's own configuration files, so that none of them opens the server.

    `page` is the path that it opens, such as lab/tree/a.ipynb; with `retries` it goes on to other ports where another
    server has taken `port` meanwhile.
    """
    words = {
        # Who may come in
        "ServerApp.identity_provider_class": "jupyter_server.auth.identity.PasswordIdentityProvider",
        "ServerApp.authorizer_class": "jupyter_server.auth.authorizer.AllowAllAuthorizer",
        "ServerApp.login_handler_class": "jupyter_server.auth.login.LoginHandler",
        "IdentityProvider.token": token,
        "PasswordIdentityProvider.token": token,
        "PasswordIdentityProvider.hashed_password": "",
        "PasswordIdentityProvider.password_required": False,
        "ServerApp.allow_origin": "",
        "ServerApp.allow_origin_pat": "",
        "ServerApp.allow_credentials": False,
        "ServerApp.allow_remote_access": False,
        "ServerApp.disable_check_xsrf": False,
        # Where it is
        "ServerApp.ip": HOST,
        "ServerApp.port": port,
        "ServerApp.port_retries": retries,
        "ServerApp.sock": "",
        "ServerApp.certfile": "",
        "ServerApp.keyfile": "",
        "ServerApp.client_ca": "",
        "ServerApp.base_url": "/",
        "ServerApp.custom_display_url": "",
        # What it shows
        "ServerApp.root_dir": root,
        "ServerApp.preferred_dir": root,
        "ServerApp.file_to_run": "",
        "ServerApp.default_url": f"/{page}",
        "LabApp.default_url": f"/{page}",
        "ServerApp.open_browser": False,  # we open it, once there is something to see
        "Application.log_level": "ERROR",
        "KernelManager.shutdown_wait_time": 2.0,
        # Kernels that cannot encrypt run as they did. Those that can would print a warning for each start without it.
        "MappingKernelManager.transport_encryption": "auto" if zmq.has("curve") else "disabled",
        "ServerApp.allow_root": os.name == "posix" and os.geteuid() == 0,
    }
    return [f"--{name}={value}" for name, value in words.items()]


def start(words: list[str], results: Path) -> Server:
    """Start the process that serves. It reads its words from a pipe, and ends when the pipe's other end is gone."""
    server = subprocess.Popen(
        [sys.executable, "-m", "eet_lab.lab.child"],
        env=environment(results),
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl+C comes to us alone, and we pass on one signal
    )
    assert server.stdin
    with suppress(BrokenPipeError):  # it has ended: whoever waits for it is told
        server.stdin.write(json.dumps(words).encode() + b"\n")
        server.stdin.flush()
    return server


def environment(results: Path) -> dict[str, str]:
    """The environment of the server and of its kernels."""
    # This environment's kernels come first: a "python3" kernel in the user's folder may lack the package.
    env = {**os.environ, "JUPYTER_PREFER_ENV_PATH": "1", paths.RESULTS_VARIABLE: str(results)}
    # JupyterLab would ask whether to fetch news: not this server. The user's own settings stay as they are.
    env["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, [str(CONFIG), env.get("JUPYTER_CONFIG_PATH")]))
    env["JUPYTER_PATH"] = os.pathsep.join(filter(None, [str(SHARE), env.get("JUPYTER_PATH")]))
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


def wait_until_up(server: Server, runtime: Path, token: str) -> dict[str, Any]:
    """What the server says of itself (url, token, root_dir ...) once it is up and lets in nobody without the token.

    SetupError where it ends, does not come up, or a configuration opens it to others.
    """
    info, deadline = runtime / f"jpserver-{server.pid}.json", time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SetupError(
                f"JupyterLab ended with code {server.returncode} before it was up; its own message is above. "
                "Check the installation: eet-lab doctor"
            )
        with suppress(OSError, ValueError):
            found = json.loads(info.read_text())
            with_token = answers(found["url"] + "api/contents", token)
            if found["token"] != token or with_token != 200 or answers(found["url"] + "api/contents") != 403:
                raise SetupError(
                    "A Jupyter configuration on this machine changes who may use the server, so it was stopped. "
                    "`jupyter --paths` lists where configurations are. Start without yours: "
                    "JUPYTER_CONFIG_DIR=$(mktemp -d) eet-lab lab"
                )
            return found
        time.sleep(0.1)
    raise SetupError(f"JupyterLab did not answer within {START_TIMEOUT_S} s. Try again, or run: eet-lab doctor")


def answers(url: str, token: str | None = None) -> int:
    """The status with which the server answers. OSError where it does not."""
    request = urllib.request.Request(url, headers={"Authorization": f"token {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
