"""How long a person waits: the real `eet-lab lab` in a real browser, from the command to the first Compare's answer.

    python benchmarks/ui_times.py --label after
    python benchmarks/ui_times.py --label before --checkout ../main --runs 5

Each run has a fresh home, Jupyter configuration, folder of notebooks and browser profile; 1440 x 900. Seconds, medians
of `--runs`, after one run that is not counted; `each` has them all. `server_s` is from the command to the printed
address; the others begin when that is entered: `kernel_s` until the page shows the kernel as idle, `drawn_s` until the
workbench stands there, `usable_s` until Compare can be pressed (the model is loaded), `answer_s` until the answer of a
Compare that was pressed then is there, `settled_s` until it changes no more. `answer_y` is how many pixels down it
begins, `stop_s` from a click on Stop to the buttons being free again. `received_bytes` came over websockets,
`saved_bytes` is the notebook after Ctrl+S.
`failed_runs`, in which no workbench came up, were taken again. Shift+Enter is pressed where the notebook that opens has
no output yet. Needs playwright and Chromium.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from jupyter_client import BlockingKernelClient
from playwright.sync_api import Error, Page, Playwright, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from chromium import FLAGS, working_browser

BENCHMARKS = Path(__file__).resolve().parent
SIZE = {"width": 1440, "height": 900}
WAIT_MS = 90_000

# Of the page as it is now and as it was: the first that is there counts.
BENCH = ".eet-bar, .eet-bench"
ANSWER = ".eet-answer .eet-numbers:not(:has(.eet-unset)), .eet-overview"
SETTLED = ".eet-answer .eet-numbers:not(.eet-provisional):not(:has(.eet-unset)), .eet-overview"
ANSWERED = re.compile("first token", re.IGNORECASE)
IDLE = ".jp-Notebook-ExecutionIndicator[data-status=idle]"
OUTPUT = ".jp-CodeCell .jp-OutputArea-output"
NUM_MODELS = "import ipywidgets; print(len(ipywidgets.widgets.widget._instances))"


def main() -> None:
    """Take the times and put the row in the place of the one with that label."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--label", required=True, help="the row's name, such as before or after")
    parser.add_argument("--checkout", type=Path, default=BENCHMARKS.parent, help="whose eet-lab runs")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--add", action="store_true", help="add these runs to those of the row")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "ui-times.json")
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    old = next((row for row in rows if args.add and row["label"] == args.label), {"each": [], "failed_runs": 0})
    each, num_failed = [], 0
    with sync_playwright() as playwright:
        while len(each) < args.runs + (not args.add):
            if found := one_run(playwright, checkout):
                print(json.dumps(found), flush=True)
                each.append(found)
            elif (num_failed := num_failed + 1) > args.runs:
                raise SystemExit("the page fails too often")
    each = old["each"] + each[not args.add :]  # the first of a new row is not counted: it compiles what it imports
    row: dict[str, Any] = {"label": args.label} | about(checkout)
    row |= {"runs": len(each), "failed_runs": old["failed_runs"] + num_failed}
    row |= {name: round(statistics.median(run[name] for run in each), 2) for name in each[0]} | {"each": each}
    rows = [one for one in rows if one["label"] != args.label] + [row]
    args.out.write_text(json.dumps({"size": SIZE, "rows": rows}, indent=1) + "\n")
    print(json.dumps({name: value for name, value in row.items() if name != "each"}, indent=1))


def about(checkout: Path) -> dict[str, Any]:
    """What was measured, and where."""
    code = "import json; from eet_lab.bench.measured import *; print(json.dumps([device_name('cpu'), versions('cpu')]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(checkout),
        cwd=checkout,
        capture_output=True,
        check=True,
        text=True,
    )
    machine, versions = json.loads(done.stdout)
    packages = {name: metadata.version(name) for name in ("jupyterlab", "ipykernel", "ipywidgets")}
    return {"machine": machine, "cores": len(os.sched_getaffinity(0))} | versions | packages


def environment(checkout: Path, home: Path | None = None) -> dict[str, str]:
    """That of a user who has never started Jupyter."""
    others = ("JUPYTER", "OMP_", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    env["PYTHONPATH"] = str(checkout)
    if home is not None:
        env |= {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
        env |= {"HOME": str(home), "IPYTHONDIR": str(home / "ipython")}
    return env


def one_run(playwright: Playwright, checkout: Path) -> dict[str, float]:
    """A server, a browser, a Compare; all ended and removed again. Empty where the page failed, which is told."""
    home = Path(tempfile.mkdtemp(prefix="eet-ui-times-"))
    env, notebooks = environment(checkout, home), home / "notebooks"
    command = [sys.executable, "-m", "eet_lab", "lab", "--no-browser", "--dir", str(notebooks)]
    begun = time.perf_counter()
    chromium = None
    lab = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=home)
    try:
        url = printed_url(lab)
        found = {"server_s": time.perf_counter() - begun}
        chromium = playwright.chromium.launch_persistent_context(
            str(home / "profile"),
            executable_path=working_browser(),
            args=FLAGS,
            headless=True,
            viewport=SIZE,
        )
        try:
            found |= in_the_page(chromium.pages[0], url)
        except Error as error:
            dialogs = chromium.pages[0].locator(".jp-Dialog").all_inner_texts()
            print(f"failed: {str(error).splitlines()[0]}; dialogs: {dialogs}", flush=True)
            return {}
        found["num_models"] = float(in_the_kernel(home / "runtime", NUM_MODELS))
        chromium.pages[0].keyboard.press("Control+s")
        chromium.pages[0].wait_for_timeout(2000)
        found["saved_bytes"] = max(path.stat().st_size for path in notebooks.rglob("workbench*.ipynb"))
    finally:
        if chromium is not None:
            chromium.close()
        lab.send_signal(signal.SIGTERM)
        lab.wait(20)
        shutil.rmtree(home, ignore_errors=True)
    return {name: round(value, 2) for name, value in found.items()}


def printed_url(lab: subprocess.Popen[str]) -> str:
    """The address that `eet-lab lab` tells its user to open."""
    assert lab.stdout
    for line in lab.stdout:
        if url := re.search(r"http://127\S+", line):
            return url[0]
    raise SystemExit(f"eet-lab lab ended with {lab.wait()} and printed no address")


def in_the_page(page: Page, url: str) -> dict[str, float]:
    """What a person waits for, in the order in which it comes."""
    received = [0]
    page.on("websocket", lambda socket: socket.on("framereceived", lambda data: count(received, data)))
    page.set_default_timeout(WAIT_MS)
    begun = time.perf_counter()

    def seconds() -> float:
        return time.perf_counter() - begun

    page.goto(url)
    page.locator(IDLE).wait_for(timeout=WAIT_MS / 2)
    found = {"kernel_s": seconds()}
    if not page.locator(OUTPUT).count():
        run_the_cell(page)
    page.locator(BENCH).first.wait_for(timeout=WAIT_MS / 2)
    found["drawn_s"] = seconds()
    compare = page.locator(BENCH).get_by_role("button", name=re.compile("^Compare")).first
    until_free(compare)
    found["usable_s"] = seconds()
    compare.click()
    answer = page.locator(ANSWER).filter(has_text=ANSWERED).first
    answer.wait_for()
    found["answer_s"] = seconds()
    box = answer.bounding_box()
    found["answer_y"] = box["y"] if box else -1
    page.locator(SETTLED).first.wait_for()
    found["settled_s"] = seconds()
    until_free(compare)
    compare.click()
    page.wait_for_timeout(1500)
    stop = page.locator(BENCH).get_by_role("button", name=re.compile("^Stop")).first
    stop.click()
    stopped = time.perf_counter()
    until_free(compare)
    return found | {"stop_s": time.perf_counter() - stopped, "received_bytes": received[0]}


def run_the_cell(page: Page) -> None:
    """As a person who reads "run the cell below (Shift+Enter)", again where it was too early."""
    cell, dialog = page.locator(".jp-CodeCell").first, page.locator(".jp-Dialog .jp-mod-accept")
    while not cell.locator(".jp-InputPrompt").inner_text().strip("[]: "):
        if dialog.count():
            dialog.first.click()
            page.wait_for_timeout(1000)
        cell.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        page.wait_for_timeout(300)


def until_free(button: Any) -> None:
    """Wait until a button can be pressed."""
    button.wait_for()
    button.page.wait_for_function("button => !button.disabled", arg=button.element_handle())


def count(received: list[int], data: str | bytes) -> None:
    """Add what came."""
    received[0] += len(data)


def in_the_kernel(runtime: Path, code: str) -> str:
    """What code prints in the only kernel."""
    [connection] = runtime.glob("kernel-*.json")
    client = BlockingKernelClient(connection_file=str(connection))
    client.load_connection_file()
    client.start_channels()
    printed: list[str] = []
    try:
        client.execute_interactive(
            code, store_history=False, timeout=30, output_hook=lambda m: printed.append(m["content"].get("text", ""))
        )
    finally:
        client.stop_channels()
    return "".join(printed).strip()


if __name__ == "__main__":
    main()
