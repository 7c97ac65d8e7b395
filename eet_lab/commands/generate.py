"""`eet-lab generate`: text in, text out, with a recipe."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from typing import Any

from eet_lab.commands.arguments import (
    NEW_TOKENS,
    add_generation,
    add_model,
    add_recipe,
    check_recipe,
    load_model,
    settings,
    tell_unfit,
)
from eet_lab.commands.command import Command
from eet_lab.commands.terminal import followed
from eet_lab.words import counted

GUIDE = """\
Continues one or more prompts and reports the time; an encoder-decoder answers them. A single prompt is streamed as it
is generated; several run as one batch and are printed at the end. Prompts are bold on a terminal; elsewhere " >>"
stands between prompt and text.

  eet-lab generate "Return a list of"
  eet-lab generate "Return" "If the file does not exist," --recipe baseline
  eet-lab generate "def main():" --temperature 0.8 --top-p 0.95 --seed 1 -n 200
  eet-lab generate "Once upon a time" --model openai-community/gpt2 --device cuda

Ctrl-C stops at the next token and keeps what is there.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="what to continue")
    parser.add_argument("--prompt", action=_Typed, help=argparse.SUPPRESS)
    add_recipe(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="go on after a token that ends a text")
    add_generation(parser)
    parser.set_defaults(new_tokens=None)
    add_model(parser)


class _Typed(argparse.Action):
    """An option of `eet-lab compare`, which is none here: says what to type."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        parser.error(f"a prompt is typed without --prompt: eet-lab generate {shlex.quote(values)}")


def run(args: argparse.Namespace) -> int:
    """Generate and print; 130 when stopped."""
    from eet_lab.engine.generation import StepEvent
    from eet_lab.models.seq2seq import Seq2Seq
    from eet_lab.models.transcript import ended_by
    from eet_lab.texts import generate

    check_recipe("--recipe", args.recipe)
    model = load_model(args, args.model)
    model.generator  # noqa: B018  ModelError for an encoder
    tell_unfit(model, args.recipe)
    if args.new_tokens is None:  # a small decoder of answers may have room for fewer
        room = model.config.context - 1 if isinstance(model.network, Seq2Seq) else NEW_TOKENS
        args.new_tokens = min(NEW_TOKENS, room)
    ends = () if args.ignore_eos else model.config.ends
    printer = Printer(args.prompts, ended_by(ends, model.decode), isinstance(model.network, Seq2Seq))
    with followed() as (line, stop):

        def on_step(event: StepEvent) -> None:
            line.clear()  # now: later the text would stand there
            printer.on_step(event)

        output = generate(
            model,
            args.prompts,
            args.recipe,
            stop_at_eos=not args.ignore_eos,
            on_step=on_step,
            progress=line,
            cancel=stop,
            **settings(args),
        )
    printer.finish(output.texts)
    run = output.run
    ttft = "–" if run.ttft_ms is None else f"{run.ttft_ms:.1f} ms"
    then = "" if run.tpot_ms is None else f", then {run.tpot_ms:.2f} ms each"
    stats = f"{counted(run.num_tokens, 'token')}, {run.tokens_per_s:.0f} tokens/s, first token {ttft}{then}"
    print(f"\n[{model.label}, {model.dtype} on {model.device}, {output.recipe}: {stats}]")
    return 130 if run.cancelled else 0


class Printer:
    """Prints a single prompt's text as it grows, or every prompt's text at the end.

    `answers`: texts are no continuation of their prompts.
    """

    def __init__(self, prompts: list[str], decode: Callable, answers: bool = False) -> None:
        from eet_lab.models.transcript import Transcript

        self._prompts, self._transcript = prompts, Transcript(decode)
        self._num_shown, self._begun = 0, False
        before, after = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", " >>")
        self._marks = before, after + " " * answers

    def on_step(self, event: object) -> None:
        """Print what one step added to the only row."""
        if len(self._prompts) == 1:
            self._begin()
            text = self._transcript.add(token for _, token in event.tokens)  # type: ignore[attr-defined]
            print(text, end="", flush=True)
            self._num_shown += len(text)

    def finish(self, texts: tuple[str, ...]) -> None:
        """Print what is left."""
        if len(self._prompts) == 1:
            self._begin()
            print(texts[0][self._num_shown :])
            return
        for number, (prompt, text) in enumerate(zip(self._prompts, texts, strict=True), 1):
            print(f"--- prompt {number} of {len(texts)}", f"{self._marked(prompt)}{text}", sep="\n")

    def _begin(self) -> None:
        """Print the only prompt, once there is a run that continues it: not before a setting is found wrong."""
        if not self._begun:
            print(self._marked(self._prompts[0]), end="", flush=True)
        self._begun = True

    def _marked(self, prompt: str) -> str:
        before, after = self._marks
        return f"{before}{prompt}{after}"


COMMAND = Command("generate", "continue prompts, and report the speed", GUIDE, add_arguments, run)
