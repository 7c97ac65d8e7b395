"""Starting JupyterLab on the workbench: notebooks in place, a free port, a token, an address to open."""

from __future__ import annotations

import contextlib
import getpass
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from eet_lab import paths
from eet_lab.errors import SetupError, did_you_mean

HOST = "127.0.0.1"
LAB_CONFIG = paths.PACKAGE / "lab_config"
FIRST_PORT, NUM_PORTS = 8888, 50
START_TIMEOUT_S = 90


def prepare(folder: Path | None = None) -> tuple[Path, Path]:
    """Put the notebooks where the user works: (the folder to serve, the folder of the notebooks in it).

    A clone is served as a whole and its notebooks are used where they are, unless `folder` is given.
    Elsewhere they are copied, by default into the current folder; what exists is kept.
    """
    target = notebooks_in(folder)
    if folder is None and paths.is_clone():
        return paths.PACKAGE.parent, target
    copied, changed = copy_notebooks(target)
    if copied:
        print(f"Copied {len(copied)} notebooks into {target}")
    for path in changed:
        print(f"Kept your {path} (the shipped one differs; move yours away to get it)")
    return target, target


def notebooks_in(folder: Path | None) -> Path:
    """The folder of the user's notebooks, which need not exist yet."""
    if folder is None and paths.is_clone():
        return paths.notebooks_dir()
    return (folder or Path.cwd()).expanduser().resolve()


def notebook_name(wanted: str, folder: Path | None = None) -> str:
    """`wanted`, with .ipynb where that was left out: a notebook that is there, or will be copied there.

    Nothing is copied yet; SetupError names those that there are.
    """
    target, name = notebooks_in(folder), wanted if wanted.endswith(".ipynb") else f"{wanted}.ipynb"
    have = sorted({path.name for place in (target, paths.notebooks_dir()) for path in place.glob("*.ipynb")})
    if name in have or ((target / name).is_file() and (target / name).resolve().is_relative_to(target)):
        return name
    raise SetupError(
        f"There is no {name} for {target}.{did_you_mean(name, have)} "
        f"There are {', '.join(have) or 'no notebooks'}. Choose one with --notebook."
    )


def copy_notebooks(target: Path) -> tuple[list[Path], list[Path]]:
    """Copy the shipped notebooks into `target`, never over a file: (what was copied, what differs there)."""
    copied, changed = [], []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for source in sorted(paths.notebooks_dir().glob("*.ipynb")):
            path = target / source.name
            try:
                with path.open("xb") as file:
                    file.write(source.read_bytes())
                copied.append(path)
            except FileExistsError:
                if path.read_bytes() != source.read_bytes():
                    changed.append(path)
    except OSError as error:
        raise SetupError(
            f"The notebooks cannot be copied into {target}: {error.strerror}. "
            "Name a folder of your own: eet-lab lab --dir FOLDER"
        ) from error
    return copied, changed


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


def has_display() -> bool:
    """Whether a browser could show up here: a desktop session, and not one behind ssh without forwarding."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def server_command(root: Path, notebook: Path, port: int, browser: bool) -> list[str]:
    """The words that start JupyterLab on `root`, open at `notebook` in it.

    The token is not among them: other users can read a process's words.
    """
    words = [
        *(sys.executable, "-m", "jupyterlab"),
        f"--ServerApp.ip={HOST}",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={root}",
        f"--LabApp.default_url=/lab/tree/{_url_path(root, notebook)}",
        "--ServerApp.answer_yes=True",  # Ctrl+C stops at once
        "--ServerApp.log_level=WARN",
    ]
    if not browser:
        words.append("--no-browser")
    if os.name == "posix" and os.geteuid() == 0:
        words.append("--allow-root")
    return words


def serve(root: Path, notebook: Path, port: int | None = None, browser: bool = True) -> int:
    """Run JupyterLab on the folder `root`, open at the file `notebook` in it, until stopped; its exit code.

    Raises SetupError when JupyterLab is missing, the port is taken, or the server fails.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise SetupError(f"JupyterLab is not installed in {sys.prefix}: {sys.executable} -m pip install jupyterlab")
    port, token = choose_port(port), secrets.token_hex(24)
    browser = browser and has_display()
    # This environment's kernels come first: a "python3" kernel in the user's folder may lack the package.
    env = {**os.environ, "JUPYTER_TOKEN": token, "JUPYTER_PREFER_ENV_PATH": "1"}
    # JupyterLab would ask whether to fetch news: not this server. The user's own settings stay as they are.
    env["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, [str(LAB_CONFIG), env.get("JUPYTER_CONFIG_PATH")]))
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    print(f"Starting JupyterLab on {notebook} ...", flush=True)
    server = subprocess.Popen(server_command(root, notebook, port, browser), env=env)
    with _signals_go_to(server):
        _wait_until_up(server, port)
        url = f"http://{HOST}:{port}/lab/tree/{_url_path(root, notebook)}?token={token}"
        print(address(url, port, browser), flush=True)
        return server.wait()


def address(url: str, port: int, browser: bool) -> str:
    """What to open, and how to get there from another computer."""
    lines = ["", "  EET Lab is running. Stop it with Ctrl+C.", "", f"  {url}", ""]
    if not browser:
        user, machine = getpass.getuser(), socket.gethostname()
        lines += [
            "  No browser here? On your own computer run this, then open the address above there:",
            f"  ssh -N -L {port}:{HOST}:{port} {user}@{machine}",
            "",
        ]
    return "\n".join(lines)


def _url_path(root: Path, notebook: Path) -> str:
    return quote(notebook.relative_to(root).as_posix())


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _wait_until_up(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SetupError(
                f"JupyterLab ended with code {server.returncode} before it was up; its own message is above. "
                "Check the installation: eet-lab doctor"
            )
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}/login", timeout=2):
                return
        except urllib.error.HTTPError:
            return  # it answers, which is what counts
        except OSError:
            time.sleep(0.2)
    raise SetupError(f"JupyterLab did not answer within {START_TIMEOUT_S} s. Try again, or run: eet-lab doctor")


@contextlib.contextmanager
def _signals_go_to(server: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ctrl+C reaches the server by itself (same terminal), so wait for it; pass SIGTERM and SIGHUP on.

    Whatever happens inside, the server has ended when this is left.
    """

    def pass_on(number: int, frame: object) -> None:
        server.send_signal(signal.SIGTERM)

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, pass_on),
        signal.SIGHUP: signal.signal(signal.SIGHUP, pass_on),
    }
    try:
        yield
    finally:
        if server.poll() is None:  # an error on our side must not leave a server behind
            server.terminate()
            server.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
