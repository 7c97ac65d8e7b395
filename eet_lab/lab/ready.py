"""Opening the workbench ready: its cell has been run, and its output is in the notebook, before the page is opened.

JupyterLab runs no cell by itself, but shows the live widgets of a running kernel that a notebook's outputs name, as
after a reload. So we start the notebook's kernel through the server's REST API (POST /api/sessions), run the cell in
it, wait until the workbench has come to rest, and save the notebook with what the cell displayed (PUT /api/contents,
where the server signs it). Only then the address is told: a page that restores widgets while they are being made or
changed loses some of it. A reload finds the widget as well, whether or not the notebook was saved since.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from queue import Empty
from typing import Any
from urllib.parse import quote

from eet_lab.errors import SetupError
from eet_lab.lab.notebooks import workbench_cell

KERNEL = "python3"
VIEW = "application/vnd.jupyter.widget-view+json"
TIMEOUT_S = 60
AT_REST = "import eet_lab; eet_lab.Workbench._opened.wait(20)"


def open_ready(server: dict[str, Any], path: str, runtime: Path) -> None:
    """Run the workbench's cell in the notebook at `path` in a kernel of its own, and save what it displays.

    `server` is what a server says of itself (url and token), `runtime` where it keeps connection files. Does nothing
    where the notebook has no such cell as it was shipped. SetupError where it cannot be done: the notebook can be run
    by hand then.
    """
    try:
        contents = f"api/contents/{quote(path)}"
        notebook = call(server, contents)["content"]
        cell = workbench_cell(notebook)
        if cell is None:
            return
        wanted = {"path": path, "name": Path(path).name, "type": "notebook", "kernel": {"name": KERNEL}}
        kernel = call(server, "api/sessions", "POST", wanted)["kernel"]["id"]
        count, outputs = displayed(runtime / f"kernel-{kernel}.json", "".join(cell["source"]))
        cell |= {"outputs": outputs, "execution_count": count}
        cell["metadata"]["trusted"] = True  # this cell; the others are what they were
        call(server, contents, "PUT", {"type": "notebook", "format": "json", "content": notebook})
    except (OSError, ValueError, LookupError, RuntimeError, Empty) as error:  # TimeoutError is an OSError
        raise SetupError(f"The workbench does not open by itself ({type(error).__name__}: {error}).") from error


def call(server: dict[str, Any], path: str, method: str = "GET", body: Any = None) -> Any:
    """What the server's REST API answers."""
    request = urllib.request.Request(
        server["url"] + path,
        None if body is None else json.dumps(body).encode(),
        {"Authorization": f"token {server['token']}", "Content-Type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def displayed(connection: Path, code: str) -> tuple[int, list[dict[str, Any]]]:
    """Run code in the kernel with that connection file: (its number there, the outputs of its cell).

    RuntimeError is what the code raised, or that it displayed no widget.
    """
    from jupyter_client.blocking.client import BlockingKernelClient

    outputs: list[dict[str, Any]] = []

    def look(message: dict[str, Any]) -> None:
        if message["msg_type"] == "display_data":
            data, metadata = message["content"]["data"], message["content"]["metadata"]
            outputs.append({"output_type": "display_data", "data": data, "metadata": metadata})

    client = BlockingKernelClient()
    client.load_connection_file(str(connection))
    client.start_channels(hb=False)  # heartbeats of a kernel that is starting on a busy machine come late
    try:
        client.wait_for_ready(timeout=TIMEOUT_S)
        reply = client.execute_interactive(code, timeout=TIMEOUT_S, output_hook=look)["content"]
        if reply["status"] != "ok":
            raise RuntimeError(f"{reply.get('ename')}: {reply.get('evalue')}")
        if not any(VIEW in output["data"] for output in outputs):
            raise RuntimeError("no widget was displayed")
        client.execute_interactive(AT_REST, silent=True, timeout=TIMEOUT_S, output_hook=lambda message: None)
    finally:
        client.stop_channels()
    return reply["execution_count"], outputs
