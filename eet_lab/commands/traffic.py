"""Options that say which requests come: a trace, or how they are drawn."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from eet_lab.errors import TrafficError

if TYPE_CHECKING:
    from eet_lab.scheduling.traffic import Lengths, Traffic

DRAWN = ("rate", "cv", "requests", "lengths", "new_tokens", "seed")
"""What has no effect beside a trace."""


def add_traffic(parser: argparse.ArgumentParser, *, requests: str, rate: str, lengths: str, new_tokens: str) -> None:
    """Declare them; the words say what their defaults are."""
    group = parser.add_argument_group("traffic")
    group.add_argument("--trace", type=Path, metavar="FILE", help="requests that were recorded")
    group.add_argument("--rate", type=float, metavar="X", help=f"requests a second (default: {rate})")
    group.add_argument("--cv", type=float, metavar="X", help="1 (default): Poisson; more: bursts; 0: like clockwork")
    group.add_argument("--requests", type=int, metavar="N", help=f"how many (default: {requests})")
    group.add_argument("--lengths", metavar="WORDS", help=f"tokens of a prompt or text (default: {lengths})")
    group.add_argument("--new-tokens", metavar="WORDS", help=f"tokens of an answer (default: {new_tokens})")
    group.add_argument("--seed", type=int, metavar="N", help="makes draws repeatable (default: 0)")


def check_trace_alone(args: argparse.Namespace) -> None:
    """TrafficError for options that would have no effect."""
    if args.trace and (idle := [name for name in DRAWN if getattr(args, name) is not None]):
        raise TrafficError(f"--{idle[0].replace('_', '-')} draws requests, but --trace gives them. Leave one out.")


def check_limit(name: str, limit: float | None) -> None:
    """TrafficError for an option that is no time."""
    if limit is not None and not 0 < limit < float("inf"):
        raise TrafficError(f"--{name} is {limit}, but it must be a number of milliseconds above 0.")


def traffic_of(
    args: argparse.Namespace,
    requests: int,
    rate: Callable[[Lengths, Lengths], float],
    lengths: str,
    new_tokens: str,
    most: int,
) -> Traffic:
    """The traffic that they mean. What they leave out is as given; `rate` may depend on lengths. Errors: TrafficError.

    `most` is where log-normal lengths are cut.
    """
    from eet_lab.scheduling.trace import read_trace
    from eet_lab.scheduling.traffic import Gamma, make_traffic

    if args.trace:
        return read_trace(args.trace)
    read = _lengths("--lengths", lengths if args.lengths is None else args.lengths, most)
    answers = _lengths("--new-tokens", new_tokens if args.new_tokens is None else args.new_tokens, most)
    arrivals = Gamma(rate(read, answers) if args.rate is None else args.rate, 1.0 if args.cv is None else args.cv)
    num, seed = requests if args.requests is None else args.requests, 0 if args.seed is None else args.seed
    return make_traffic(num, arrivals, read, answers, seed)


def _lengths(option: str, words: str, most: int) -> Lengths:
    """What the words of an option mean; TrafficError names it."""
    from eet_lab.scheduling.traffic import read_lengths

    try:
        return read_lengths(words, most)
    except TrafficError as error:
        raise TrafficError(f"{option}: {error}") from error
