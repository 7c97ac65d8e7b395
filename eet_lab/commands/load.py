"""`eet-lab load`: requests to a server when they are due, and how long their answers take."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eet_lab.commands.arguments import read_key
from eet_lab.commands.command import Command
from eet_lab.commands.terminal import check_writable, followed
from eet_lab.commands.traffic import add_traffic, check_limit, check_trace_alone, traffic_of
from eet_lab.errors import TrafficError
from eet_lab.words import plain

GUIDE = """\
Sends requests to a server with OpenAI's interface, each when it is due, whatever has become of those before (open
loop), and prints how long answers took from then on: to the first token (TTFT), per token after it (TPOT), and in all.

  eet-lab load                                            100 requests to a server of eet-lab serve
  eet-lab load http://127.0.0.1:8000 --rate 20 --requests 2000 --lengths lognormal:200:0.8 --new-tokens 16-128
  eet-lab load --cv 3 --ttft 500 --tpot 50                bursts; how many answers keep to these limits (goodput)
  eet-lab load --endpoint embeddings --lengths 5-500      texts for an encoder
  eet-lab load https://example.org/v1 --api-key-file key.txt --text --stop-at-eos --trace requests.csv

Lengths: 128; 5-500 (uniform); lognormal:MEDIAN:SIGMA; or a file of whole numbers, one a line. A trace is CSV with
time (in seconds), length and, if need be, new_tokens in each line, or JSONL with these names. Prompts are random
token ids, or words with --text.

A request with 429 or 503 was refused; another error failed it; one without a complete answer is lost. The exit code
is 0 where every request was answered or refused, and 1 where not.
"""
DEFAULT_URL = "http://127.0.0.1:8000"
REQUESTS, RATE, LENGTHS, NEW_TOKENS = 100, 5.0, "5-100", "5-50"
MOST_LENGTH = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help="with /v1 or without (default: %(default)s)")
    parser.add_argument("--endpoint", default="completions", help="completions (default), chat or embeddings")
    parser.add_argument("--model", metavar="NAME", help="default: the first one that the server has")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="a file with the key that the server wants")
    parser.add_argument(
        "--text", action="store_true", help="prompts are words; the tokenizer decides how many tokens each has"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="draw token ids below it (default: 1,000, or what the server says of the model if that is less)",
    )
    parser.add_argument("--stop-at-eos", action="store_true", help="answers may end early (OpenAI's own API wants it)")
    timeout = "seconds after which an unanswered request counts as lost (default: 600)"
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help=timeout)
    add_traffic(parser, requests=str(REQUESTS), rate=plain(RATE), lengths=LENGTHS, new_tokens=NEW_TOKENS)
    group = parser.add_argument_group("what counts as good")
    group.add_argument("--ttft", type=float, metavar="MS", help="the first token within so many milliseconds")
    group.add_argument("--tpot", type=float, metavar="MS", help="so many milliseconds per token after it")
    group.add_argument("--limit", type=float, metavar="MS", help="the whole answer within so many")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the numbers as JSON")


def run(args: argparse.Namespace) -> int:
    """Send and print; 1 where requests failed or were lost."""
    from eet_lab.serving.load import Target, run_load

    check_writable(args.save)
    check_trace_alone(args)
    if args.endpoint == "embeddings" and args.new_tokens is not None:
        raise TrafficError("--new-tokens is for answers, but an embedding is a vector, without tokens. Leave it out.")
    for name in ("ttft", "tpot", "limit"):
        check_limit(name, getattr(args, name))
    limits = {"ttft_ms": args.ttft, "tpot_ms": args.tpot, "e2e_ms": args.limit}
    key = args.api_key_file and read_key(args.api_key_file)
    target = Target(args.url, args.endpoint, args.model, key, args.text, not args.stop_at_eos, args.vocab_size)
    traffic = traffic_of(args, REQUESTS, lambda *_: RATE, LENGTHS, NEW_TOKENS, MOST_LENGTH)
    with followed() as (line, stop):
        loaded = run_load(target, traffic, seed=args.seed or 0, timeout_s=args.timeout, progress=line, cancel=stop)
    print(loaded.report(**limits))
    if args.save:
        args.save.write_text(json.dumps(loaded.summary(**limits), indent=1) + "\n", encoding="utf-8")
        print(f"saved to {args.save}")
    return 1 if loaded.counts["failed"] or loaded.counts["lost"] else 0


COMMAND = Command("load", "put load on a server, and measure its answers", GUIDE, add_arguments, run)
