"""The lab, from command to page: start the server, have the workbench ready, tell the address, wait for the end."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from eet_lab import paths
from eet_lab.errors import SetupError
from eet_lab.imports import check_installed
from eet_lab.lab import server
from eet_lab.lab.notebooks import WORKBENCH
from eet_lab.lab.ready import open_ready
from eet_lab.lab.stop import Stop

NO_MATHJAX = "data:text/javascript,MathJax={Hub:{Config(){},Configured(){},Queue(){},Register:{StartupHook(){}}}}//"
"""A script in place of MathJax's, which would come from another server: the page has no formulas."""
TEMPLATE = "--VoilaConfiguration.template=eet-lab"
# Voila's page asks other servers for fonts. Nothing leaves this machine: the browser is told to ask only this one.
# Older browsers take 'self' for http alone, so the kernel's socket is named; no `default-src` covers frame-ancestors.
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "connect-src 'self' data: blob: ws://{host}:{port} ws://localhost:{port}; frame-ancestors 'self'"
)


def serve(root: Path, notebook: Path, port: int | None = None, browser: bool = True, app: bool = False) -> int:
    """Run JupyterLab on the folder `root`, open at the file `notebook` in it, until stopped; its exit code.

    The workbench opens ready, alone in its page. With `app` there is no code in the page: Voila runs the notebook. A
    signal that comes before the server is up makes the exit code 128 + its number. SetupError when JupyterLab or Voila
    is missing, the port is taken, or the server fails.
    """
    for package in ("jupyterlab", "voila") if app else ("jupyterlab",):
        check_installed([package], "the lab needs", f"{sys.executable} -m pip install {package}")
    stop = Stop()
    with stop.watched():
        from jupyter_core.paths import jupyter_runtime_dir

        token, retries = secrets.token_hex(24), server.NUM_PORTS if port is None else 0
        path, is_workbench = notebook.relative_to(root).as_posix(), notebook.name == WORKBENCH
        page = f"{'voila/render' if app else 'doc/tree' if is_workbench else 'lab/tree'}/{quote(path)}"
        chosen = server.choose_port(port)
        print(f"Starting {'Voila' if app else 'JupyterLab'} on {notebook} ...", flush=True)
        words = server.server_words(root, page, chosen, token, retries) + [TEMPLATE, offline(chosen)] * app
        stop.server = server.start(words, root / paths.RESULTS)
        info = server.wait_until_up(stop.server, Path(jupyter_runtime_dir()), token)
        if is_workbench and not app:
            try:
                open_ready(info, path, Path(jupyter_runtime_dir()))
            except SetupError as error:
                print(f"{error} Press Shift+Enter in its cell.", file=sys.stderr)
        stop.up = True
        browser = browser and has_display()
        print(address(f"{info['url']}{page}?token={token}", info["port"], browser), flush=True)
        if browser:  # by way of a file that only its owner can read: others can read the words of a process
            webbrowser.open((Path(jupyter_runtime_dir()) / f"jpserver-{info['pid']}-open.html").as_uri())
        return stop.server.wait()


def offline(port: int) -> str:
    """The server's word that keeps its pages to itself: they ask no other server, and stand in no other page."""
    headers = {"Content-Security-Policy": POLICY.format(host=server.HOST, port=port)}
    return "--ServerApp.tornado_settings=" + repr({"headers": headers, "mathjax_url": NO_MATHJAX})


def address(url: str, port: int, browser: bool) -> str:
    """What to open, and how to get there from another computer."""
    lines = ["", "  EET Lab is running. Stop it with Ctrl+C.", "", f"  {url}", ""]
    if not browser:
        user = "USER"
        with suppress(OSError, KeyError):  # a container may run as a user without a name
            user = getpass.getuser()
        lines += [
            "  No browser here? On your own computer run this, then open the address above there:",
            f"  ssh -N -L {port}:{server.HOST}:{port} {user}@{socket.gethostname()}",
            "",
        ]
    return "\n".join(lines)


def has_display() -> bool:
    """Whether a browser could show up here: a desktop session, and not one behind ssh without forwarding."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
