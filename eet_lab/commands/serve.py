"""`eet-lab serve`: a model behind an HTTP server with OpenAI's interface."""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from eet_lab.collector import no_collection
from eet_lab.commands.arguments import add_model, check_recipe, read_key
from eet_lab.commands.command import Command
from eet_lab.commands.terminal import ProgressLine
from eet_lab.errors import SetupError
from eet_lab.words import plain, told

GUIDE = """\
Serves a model with OpenAI's interface: /v1/completions, /v1/chat/completions, /v1/models, and for encoders
/v1/embeddings and /v1/classify; /health, and /metrics with vLLM's names.

  eet-lab serve                                    the demo model on http://127.0.0.1:8000
  eet-lab serve --model llama-1b --recipe all,continuous_batching:rows=256:budget=2048
  eet-lab serve --model bert-folder --policy dynamic_program     a batching policy of eet-lab simulate, for encoders
  eet-lab serve --model folder --host 0.0.0.0 --api-key-file key.txt
  eet-lab serve --model folder --replicas 2        two processes of Ray Serve, a GPU each (extra: ray)
  eet-lab serve --model folder --replicas 1-8      as many as requests ask for

It listens on this machine only unless --host says otherwise. Ctrl+C or SIGTERM finishes what was accepted and refuses
the rest; a second one ends it at once.
"""
OPTIONS = (
    ("max-queued-requests", int, "N", "refuse with 429 while so many wait for their first token (default: 1024)"),
    ("max-queued-tokens", int, "N", "the same while the prompts of those have so many tokens (default: 1048576)"),
    ("max-body-bytes", int, "N", "refuse a longer body with 413 (default: 4194304)"),
    ("max-model-len", int, "N", "most tokens of a prompt and its answer (default: the context, at most 4096)"),
    ("header-s", float, "S", "seconds for a request's headers to arrive (default: 10)"),
    ("body-s", float, "S", "seconds for its body (default: 30)"),
    ("request-s", float, "S", "seconds for its answer (default: 600)"),
    ("drain-s", float, "S", "seconds to finish what was accepted, at the end (default: 30)"),
    ("response-cache-mib", int, "MIB", "keep so many MiB of answers for requests that come again (default: 0, none)"),
    ("served-model-name", str, "NAME", "the model's name in requests (default: as it was loaded)"),
    ("policy", str, "WORDS", "which texts an encoder reads together: a batching policy of eet-lab simulate"),
    ("pool", str, "HOW", "vectors of /v1/embeddings: mean, or cls, of which a pooler makes its own (default: mean)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port; 0: any free one (default: 8000)")
    parser.add_argument(
        "--front",
        choices=("process", "thread"),
        help="where HTTP and texts are worked at: beside the engine's process, or in it (default: beside it)",
    )
    parser.add_argument("--recipe", metavar="WORDS", help="default: all,continuous_batching; of an encoder: all")
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="a file with the key that clients must bring (other users of the machine can read a command's words)",
    )
    for name, kind, metavar, text in OPTIONS:
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--replicas",
        type=_span,
        metavar="N",
        help="serve by N processes of Ray Serve, or by 1-4 of them as load comes; each has a GPU, or with --device cpu "
        "a core, and each has the bounds above",
    )
    group.add_argument(
        "--target-ongoing-requests",
        type=int,
        metavar="N",
        help="with --replicas 1-4: start another one where more than N requests are in each (default: 32)",
    )
    add_model(parser)


def _span(text: str) -> int | tuple[int, int]:
    found = re.fullmatch(r"(-?[0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{told(text)} is neither a number, such as 2, nor two, such as 1-4")
    least, most = found.groups()
    return int(least) if most is None else (int(least), int(most))


def _check(args: argparse.Namespace) -> None:
    """SetupError for options that would have no effect."""
    least, most = args.replicas if isinstance(args.replicas, tuple) else (args.replicas, args.replicas)
    if args.target_ongoing_requests is not None and least == most:
        raise SetupError(
            "--target-ongoing-requests says when to start another replica: give the fewest and the most of them, "
            "such as --replicas 1-4."
        )
    if args.front is not None and args.replicas is not None:
        raise SetupError("--front is for a server of this command, and --replicas for Ray Serve's. Leave one out.")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; 0."""
    _check(args)
    check_recipe("--recipe", args.recipe)
    options = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name, *_ in OPTIONS}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if args.api_key_file is not None:
        given["api_key"] = read_key(args.api_key_file)
    if args.host not in ("127.0.0.1", "localhost", "::1") and "api_key" not in given:
        print("Whoever reaches this port can use the model: there is no --api-key-file.", file=sys.stderr)
    if args.replicas is None:
        _serve_here(args, given)
    else:
        _serve_replicas(args, given)
    return 0


def _serve_here(args: argparse.Namespace, options: dict[str, Any]) -> None:
    with no_collection():  # it would walk all modules again and again
        from eet_lab.models import load
        from eet_lab.serving.handle import run_server, serving

    model = load(args.model, device=args.device, dtype=args.dtype)
    line = ProgressLine()
    server, url = serving(model, args.recipe, args.host, args.port, options, args.front, line)
    server.told_up = line.clear
    drain_s = plain(server.service.options.drain_s)
    ends = f"\nFinishing what was accepted, within {drain_s} s. Ctrl+C ends it at once."
    server.told_drain = lambda: print(ends, file=sys.stderr, flush=True)
    said = f"Serving {model.name} ({server.service.card.recipe}) on {url}; Ctrl+C ends it."
    try:
        run_server(server, started=lambda: print(said, flush=True))
    finally:
        line.clear()  # where it ends before it is up


def _serve_replicas(args: argparse.Namespace, options: dict[str, Any]) -> None:
    from eet_lab.serving.replicas import TARGET, serve_replicas

    served = serve_replicas(
        args.model,
        args.recipe,
        replicas=args.replicas,
        target_ongoing_requests=TARGET if args.target_ongoing_requests is None else args.target_ongoing_requests,
        device=args.device,
        dtype=args.dtype,
        host=args.host,
        port=args.port,
        **options,
    )

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt  # the second one ends `stop` too

    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        print(f"Serving {served.what} on {served.url}; Ctrl+C ends it.", flush=True)
        while True:  # an event's `wait` holds a lock for a moment, on which a handler that sets it would hang
            served.check()
            time.sleep(1)
    except KeyboardInterrupt:
        pass
    finally:
        served.stop()


COMMAND = Command("serve", "serve a model over HTTP, with OpenAI's interface", GUIDE, add_arguments, run)
