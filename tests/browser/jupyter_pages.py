"""A Jupyter server of the test's own, and JupyterLab in a page of the browser."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CONFIG = NOTEBOOKS.parent / "eet_lab" / "lab" / "config"
LEAN = """import runpy, sys
sys.modules["rfc3987_syntax"] = None
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)"""
"""Runs a module without what `eet_lab.lab.child` does without."""


class Server:
    """A Jupyter server of the test's own, on a free port, with its own home."""

    def __init__(self, app: list[str], root: Path, home: Path, ready: str, kernels: dict[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.root, self.token, self.log = root, secrets.token_hex(8), home / "server.log"
        self.base = f"http://127.0.0.1:{self.port}"
        folders = {f"JUPYTER_{name}_DIR": str(home / name) for name in ("CONFIG", "DATA", "RUNTIME")}
        env = {**os.environ, **folders, "HOME": str(home), "IPYTHONDIR": str(home / "ipython"), "OMP_NUM_THREADS": "1"}
        env["JUPYTER_CONFIG_PATH"] = str(CONFIG)  # as `eet-lab lab` has it
        env |= kernels | {"JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"), "JUPYTER_TOKEN": self.token}
        command = [sys.executable, "-c", LEAN, *app, "--no-browser", f"--port={self.port}"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=root, env=env, stdout=log, stderr=log, start_new_session=True)
        self._wait_for(f"{self.base}{ready}?token={self.token}")

    def _wait_for(self, url: str) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            try:
                urllib.request.urlopen(url, timeout=1).close()
                return
            except urllib.error.HTTPError:
                return  # it answers, which is what counts
            except OSError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"no answer from {url}: {self.log.read_text()[-2000:]}")

    def close(self) -> None:
        """Stop the server and its kernels: they are one process group, started here."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


class Lab:
    """JupyterLab in the page."""

    def __init__(self, page: Any, server: Server) -> None:
        self.page, self.server = page, server

    def open(self, name: str) -> None:
        """Open a notebook and wait until its kernel can take a command: the "idle" of the page comes too early."""
        self.page.goto(f"{self.server.base}/lab/tree/{name}?token={self.server.token}&reset")
        self.page.wait_for_function("() => window.jupyterapp", timeout=60_000)
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
        self.page.evaluate(
            """async () => {
                const panel = window.jupyterapp.shell.currentWidget;
                await panel.context.ready; await panel.sessionContext.ready;
                for (let i = 0; i < 300 && panel.sessionContext.session?.kernel?.status !== 'idle'; i++)
                    await new Promise((done) => setTimeout(done, 100));
                // The page asks a new kernel for its widgets; those of a cell that runs meanwhile would be made twice.
                await panel.sessionContext.session.kernel.requestCommInfo({ target_name: 'jupyter.widget' });
            }"""
        )

    def command(self, name: str, **words: str) -> None:
        """Run one of the application's commands, whose widget stays in the page: to be told it takes 20 s."""
        self.page.evaluate(
            "async ([name, words]) => { await window.jupyterapp.commands.execute(name, words); }", [name, words]
        )

    def run_all(self) -> None:
        """Run all cells, without waiting for their end."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")

    def execute(self, code: str) -> str:
        """Run code in the notebook's kernel, beside its cells; what it printed."""
        text, error = self.page.evaluate(
            """async (code) => {
                const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
                const run = kernel.requestExecute({ code, store_history: false });
                let text = '', error = '';
                run.onIOPub = (m) => { if (m.header.msg_type === 'stream') text += m.content.text;
                                       if (m.header.msg_type === 'error') error += m.content.traceback.join('\\n'); };
                await run.done;
                return [text.trim(), error];
            }""",
            code,
        )
        assert not error, error
        return text

    def few_rounds(self) -> None:
        """Have the notebook's kernel time recipes twice: that tells no effect from noise, in a third of the time."""
        self.execute("from eet_lab.bench import timing; timing.LEAST_PAIRS = timing.MOST_ROUNDS = 2")

    def threads(self) -> list[str]:
        """The lab's threads in the notebook's kernel."""
        code = "import threading; print(*sorted(t.name for t in threading.enumerate() if t.name.startswith('eet-')))"
        return self.execute(code).split()

    def save(self) -> dict[str, Any]:
        """Save the notebook with the state of its widgets; what was saved.

        That state is saved by a setting, which the server keeps: the command turns it over. Afterwards it is off again.
        """
        found = self.page.evaluate(
            """async () => {
                const { commands, shell } = window.jupyterapp, { context } = shell.currentWidget;
                const setting = '@jupyter-widgets/jupyterlab-manager:saveWidgetState';
                const turn = async (on) => {
                    if (commands.isToggled(setting) !== on) await commands.execute(setting);
                    for (let i = 0; i < 100 && commands.isToggled(setting) !== on; i++)
                        await new Promise((done) => setTimeout(done, 100));
                    if (commands.isToggled(setting) !== on) throw new Error(`the setting was not turned to ${on}`);
                };
                await turn(true);
                await context.save();
                await turn(false);
                return context.path;
            }"""
        )
        return json.loads((self.server.root / found).read_bytes())

    def close_kernels(self) -> None:
        """The next test gets fresh ones."""
        self.page.evaluate(
            """async () => { const app = window.jupyterapp;
                if (app) { await app.serviceManager.sessions.shutdownAll(); } }"""
        )
