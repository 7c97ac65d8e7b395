"""What watching costs: the workbench in a real kernel, live at 10 Hz, against the same engine with nobody watching.

A client stands in for the page: it takes every message that the page would get, and draws nothing. Watched and
unwatched runs alternate in one kernel; the rate is that of the decode steps after the first twenty, in which graphs
are captured.

    python benchmarks/live_view.py --model gpt2-xl --out live_view.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jupyter_client.manager import start_new_kernel

CELL = """
import json, statistics, threading
import eet_lab
from IPython.display import display

SKIP, WORDS = 20, "one two three four five six seven eight nine ten "
prompts = [WORDS * count for count in (1, 2, 3, 4, 5, 6, 7, 8)]
model = eet_lab.load({model!r})
rows = [model.encode(prompt) for prompt in prompts]
settings = eet_lab.Settings(max_new_tokens={new_tokens})


def rate(run):
    return len(rows) * (len(run.step_ms) - SKIP) / sum(run.step_ms[SKIP:]) * 1e3


def alone():
    found = []

    def work():
        engine = eet_lab.Engine(model.decoder, eet_lab.Recipe.parse("all", model.device).parts)
        found.append(rate(engine.generate(rows, settings)))
        engine.close()

    thread = threading.Thread(target=work)  # as in the workbench: not on the kernel's own thread
    thread.start()
    thread.join()
    return found[0]


def watched(bench):
    bench.press("run")
    return rate(bench.wait().measurement)


unseen, seen = [], []
for _ in range({rounds}):
    unseen += [alone() for _ in range({runs})]
    bench = eet_lab.Workbench({model!r}, prompts, "all", max_new_tokens={new_tokens}, temperature=0.0)
    display(bench)
    bench.wait()
    seen += [watched(bench) for _ in range({runs})]
    bench.close()
before, after = statistics.median(unseen), statistics.median(seen)
print(json.dumps(dict(model={model!r}, unwatched=unseen, watched=seen, tokens_per_s=before, watched_tokens_per_s=after,
                      cost_percent=(1 - after / before) * 100)))
"""


def main() -> int:
    """Run the cell in a kernel of its own, and write what it found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt2-xl")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    manager, client = start_new_kernel()
    printed: list[str] = []
    messages = [0, 0]

    def receive(message: dict[str, Any]) -> None:
        messages[0] += 1
        messages[1] += sum(map(len, message.get("buffers", []))) + len(repr(message["content"]))
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])
        elif message["msg_type"] == "error":
            printed.append("\n".join(message["content"]["traceback"]))

    try:
        cell = CELL.format(model=args.model, new_tokens=args.new_tokens, rounds=args.rounds, runs=args.runs)
        reply = client.execute_interactive(cell, timeout=400, output_hook=receive)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    if reply["content"]["status"] != "ok":
        print("".join(printed))
        return 1
    found = json.loads("".join(printed).splitlines()[-1]) | {"messages": messages[0], "message_bytes": messages[1]}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
