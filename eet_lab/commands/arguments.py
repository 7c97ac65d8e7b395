"""Options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eet_lab.errors import PromptError, RecipeError, SetupError
from eet_lab.files import regular_content
from eet_lab.scheduling.whole import MOST, check_whole
from eet_lab.words import visible

if TYPE_CHECKING:
    from eet_lab.models import Model

MOST_KEY = 16_384
"""Bytes of a file with an API key."""


def add_model(
    parser: argparse.ArgumentParser,
    default: str | None = "demo",
    dtype: str = "float16 on a GPU, float32 on the CPU",
) -> None:
    """--model, --device and --dtype; the help says what `dtype` is without it."""
    group = parser.add_argument_group("model")
    if default is not None:
        group.add_argument(
            "--model",
            default=default,
            metavar="NAME",
            help="demo (bundled), a preset such as gpt2-xl, llama-1b, qwen3-0.6b or opt-1.3b (true size, random "
            "weights), a folder in Hugging Face format, or a hub name such as openai-community/gpt2 (default: "
            "%(default)s)",
        )
    group.add_argument("--device", metavar="NAME", help="cuda, cuda:1 or cpu (default: the GPU where there is one)")
    group.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], help=f"default: {dtype}")


def load_model(args: argparse.Namespace, name: str) -> Model:
    """The model of that name, of any kind."""
    from eet_lab.models import load

    return load(name, device=args.device, dtype=args.dtype)


def read_key(path: Path) -> str:
    """The API key that a file holds. Errors: SetupError."""
    content = regular_content(path, "an API key", MOST_KEY, SetupError, remedy="Give the file of the key.")
    try:
        key = content.decode().strip()
    except UnicodeDecodeError:
        key = ""
    if not key.isprintable() or not key:
        raise SetupError(f"{visible(str(path))} must hold an API key and nothing else, on one line.")
    return key


def check_recipe(option: str, words: str | None) -> None:
    """RecipeError for a recipe of no word, such as of a variable that the shell does not know; None was not given."""
    if words is not None and not words.strip(" ,"):
        raise RecipeError(f"{option} is {words!r}, which names no technique. Write baseline to run without any.")


def tell_unfit(model: Model, recipe: str) -> None:
    """Say which techniques `all` leaves out for this model, and why, if a recipe has that word."""
    from eet_lab.technique import is_in_all, known, unfit

    if "all" in recipe.split(","):
        for name, reason in unfit(model.device, model.config).items():
            if is_in_all(known(name)):
                print(f"{name} is left out for this model: {reason}.", file=sys.stderr)


NEW_TOKENS = 64


def add_generation(parser: argparse.ArgumentParser) -> None:
    """How to generate: the fields of `Settings` that suit a command line."""
    group = parser.add_argument_group("generation")
    group.add_argument("-n", "--new-tokens", type=int, default=NEW_TOKENS, metavar="N", help=f"default: {NEW_TOKENS}")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 (greedy, the default) or 1e-4 and more"
    )
    group.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="with a temperature: sample from the N most likely (0: all)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="X",
        help="with a temperature: sample from the most likely tokens that sum to X (1: all)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="makes draws repeatable (default: 0)")


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The same as keyword arguments; says so where one of them has no effect. PromptError for no number of tokens."""
    check_whole(PromptError, "--new-tokens", args.new_tokens, 1, MOST)
    if args.temperature == 0 and (args.top_k or args.top_p != 1):
        print("--temperature is 0: tokens are greedy, and --top-k and --top-p have no effect.", file=sys.stderr)
    return {
        "max_new_tokens": args.new_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "seed": args.seed,
    }


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """--recipe."""
    parser.add_argument(
        "--recipe", default="all", metavar="WORDS", help="see `eet-lab techniques --help` (default: all)"
    )
