"""`eet-lab train`: small models from nothing, or a model of one's own on a file."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eet_lab.commands.arguments import add_model, add_recipe, check_recipe
from eet_lab.commands.command import Command
from eet_lab.commands.terminal import followed
from eet_lab.errors import TrainingError

if TYPE_CHECKING:
    from eet_lab.training.run import Evaluation, TrainRun

GUIDE = """\
Trains a small model from random weights, on data that is on every machine or is drawn, or a model of your own on a
file, and tells the loss on what was held out. Nothing is downloaded but a model by its hub name.

  eet-lab train translator-tiny                     numbers, from words to digits: a minute or two of a CPU
  eet-lab train vit-tiny --save digits              pictures of digits; a checkpoint that transformers reads
  eet-lab train gpt2-tiny --steps 1000              Python's documentation, read a few times
  eet-lab train gpt2-mini --device cuda --dtype bfloat16 --save writer
  eet-lab generate "The built-in function" --model ./writer --temperature 0.7

  eet-lab train --model ./gpt2 --data texts.jsonl --steps 500 --lr 3e-5 --dtype bfloat16 --save tuned
  eet-lab train --model ./bert --data rated.jsonl --checkpoint run --save rated        and after Ctrl-C: --resume

Models: gpt2-tiny and, for a GPU, gpt2-mini (the documentation of this Python), bert-tiny (numbers in words and in
digits, some of them masked), translator-tiny, vit-tiny (scikit-learn's handwritten digits where it is installed, and
else drawn ones).

Data: a text file, or JSON lines with a "text" each; for tasks that have labels, JSON lines with a "text" or its "ids",
and "labels". A tenth of it is held out, at most 64 rows. Ctrl-C or SIGTERM ends the training, and keeps what was
learned.
"""
OWN: Sequence[tuple[str, Callable[[str], object], str, str]] = (
    ("data", str, "FILE", "training data (default: what ships for its task)"),
    ("task", str, "NAME", "language, masked, classes, token-classes or seq2seq (default: what its head is for)"),
    ("lr", float, "X", "learning rate (default: 3e-5)"),
    ("warmup-steps", int, "N", "steps in which the learning rate rises to that (default: 5, or all of fewer)"),
    ("batch-rows", int, "N", "rows, or examples, of a step (default: 4)"),
    ("row-tokens", int, "N", "tokens of the rows that texts are cut into (default: 128, or the context)"),
    ("dropout", float, "X", "share of hidden states, and of attention's weights, that is dropped (default: 0)"),
    ("checkpoint", str, "DIR", "write a checkpoint there ten times in the run, and at its end"),
)
"""The options for a model of one's own: the fields of `TrainAsked`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("demo", metavar="NAME", nargs="?", help="a small model to train from nothing: see above")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the optimizer (default: NAME's own, or 40)")
    add_recipe(parser)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the model there when it is done")
    add_model(parser, default=None, dtype="float32")
    group = parser.add_argument_group("a model of your own")
    group.add_argument("--model", metavar="MODEL", help="a folder in Hugging Face format, a hub name, or demo")
    for name, kind, metavar, text in OWN:
        group.add_argument(f"--{name}", type=kind, metavar=metavar, help=text)
    group.add_argument("--resume", action="store_true", help="go on from the checkpoint that is there")


def run(args: argparse.Namespace) -> int:
    """Train and print; 130 when stopped."""
    from eet_lab.errors import ModelError
    from eet_lab.files import check_folder

    check_recipe("--recipe", args.recipe)
    own = [name for name, *_ in OWN if getattr(args, _field(name)) is not None] + ["resume"] * args.resume
    if args.model is None and args.demo is None:
        raise TrainingError("Which model? Give the NAME of a small one, such as gpt2-tiny, or --model and --data.")
    if args.model is not None and args.demo is not None:
        raise TrainingError(f"{args.demo} is trained from nothing, and --model {args.model} is another. Leave one out.")
    if args.model is None and own:
        raise TrainingError(f"--{own[0]} is for a model of your own. Give that as --model, or leave --{own[0]} out.")
    work = _train_demo if args.model is None else _train_own
    if args.save:
        check_folder(args.save, "The model", ModelError)  # before there is anything to lose
    return work(args)


def _tell_overwritten(args: argparse.Namespace) -> None:
    if args.save and (args.save / "config.json").exists():
        print(f"{args.save} holds a model already, which this one will overwrite.", file=sys.stderr)


def _field(option: str) -> str:
    return option.replace("-", "_")


def _train_demo(args: argparse.Namespace) -> int:
    from eet_lab.devices import checked_device, kind_of
    from eet_lab.models.loading import checked_dtype
    from eet_lab.progress import Clock
    from eet_lab.technique import Recipe
    from eet_lab.training.demos import demo_of, train_demo
    from eet_lab.words import percent

    demo, device = demo_of(args.demo), checked_device(args.device)
    demo = demo if args.steps is None else demo.in_steps(args.steps)
    dtype = checked_dtype(args.dtype or "float32", device)
    kind, config = kind_of(device), demo.config.in_training
    recipe = Recipe.parse(args.recipe, kind, config).check(kind, config)
    _tell_overwritten(args)
    with followed(Clock(), signal.SIGTERM) as (line, stop):
        line(0, demo.steps, "reading what was held out")
        found = train_demo(demo, recipe.parts, device=device, dtype=dtype, progress=line, cancel=stop)
    print(f"{demo.title}: {found.model.config.num_params:,} weights, {found.model.dtype} on {device}, {recipe}")
    if demo.which is not None:
        print(f"data: {demo.which()}")
    _tell(found.run, found.seconds)
    print(f"right: {percent(found.right)} {'of all answers' if demo.is_whole else 'of all that is asked for'}")
    if args.save:
        found.model.save(args.save)
        print(f"saved in {args.save}")
    return 130 if found.run.was_stopped else 0


def _train_own(args: argparse.Namespace) -> int:
    from dataclasses import replace
    from time import perf_counter

    from eet_lab.devices import present
    from eet_lab.errors import EETError, ModelError
    from eet_lab.files import check_folder
    from eet_lab.models import load
    from eet_lab.progress import Clock
    from eet_lab.threads import cpu_threads
    from eet_lab.training.asked import TrainAsked, changed_words, weight_bytes
    from eet_lab.training.step import NotFinite
    from eet_lab.words import counted, visible

    given = {_field(name): getattr(args, _field(name)) for name, *_ in OWN} | {"steps": args.steps}
    given |= {"folder": given.pop("checkpoint"), "techniques": tuple(args.recipe.split(","))}
    asked = TrainAsked(**{name: value for name, value in given.items() if value is not None})
    if args.resume and not asked.has_checkpoint:
        where = f"in {visible(asked.folder)}. Give the folder of one as" if asked.folder else "without"
        raise TrainingError(f"There is no checkpoint to --resume from {where} --checkpoint.")
    if asked.has_checkpoint and not args.resume:
        raise TrainingError(
            f"{visible(asked.folder)} holds a checkpoint, which this training would overwrite. Give --resume to go on "
            "from it, or another folder."
        )
    model = load(args.model, device=args.device, dtype=args.dtype or "float32")
    asked.check(model)
    asked.check_place(model)
    if args.save:
        check_folder(args.save, "The model", ModelError, weight_bytes(model))
    rows, held_out = asked.rows(model)
    if asked.batch_rows > len(rows):
        print(
            f"A step reads {counted(asked.batch_rows, rows.unit)}, and there are {len(rows):,}: it reads some of them "
            "more than once. --batch-rows asks for fewer.",
            file=sys.stderr,
        )
    if not args.save and asked.place is None:
        print("What is learned will not be kept: give --save.", file=sys.stderr)
    elif asked.place is None:
        print("A process that is killed loses what is learned; --checkpoint keeps it.", file=sys.stderr)
    _tell_overwritten(args)
    with cpu_threads(model.device), present(model.network.device), followed(Clock(), signal.SIGTERM) as (line, stop):
        trainer = asked.trainer(model, args.resume)
        if changed := changed_words(asked.changed(trainer, rows), lambda name: f"--{name.replace('_', '-')}"):
            print(changed, file=sys.stderr)
        line(trainer.num_steps, asked.steps, "reading what was held out")
        begin = perf_counter()
        first = trainer.num_steps
        try:
            done = asked.train(trainer, rows, held_out, progress=line, cancel=stop)
        except NotFinite:  # weights that no longer give a loss
            raise
        except EETError:
            if args.save and trainer.num_steps > first:
                line.clear()
                try:
                    replace(model, network=trainer.trained()).save(args.save)
                    print(f"saved in {args.save}, after {counted(trainer.num_steps, 'step')}", file=sys.stderr)
                except EETError as problem:  # what ended the training is told, too
                    print(problem, file=sys.stderr)
            raise
        seconds = perf_counter() - begin
    unit = rows.unit
    print(f"{model.name}: {model.config.num_params:,} weights, {model.dtype} on {model.device}, {asked.recipe(model)}")
    print(f"data: {counted(len(rows), unit)}, and {counted(len(held_out), unit)} held out")
    _tell(done, seconds)
    if args.save:
        replace(model, network=trainer.trained()).save(args.save)
        print(f"saved in {args.save}")
    return 130 if done.was_stopped else 0


def _tell(run: TrainRun, seconds: float) -> None:
    from eet_lab.words import brief, counted

    speed = "" if run.tokens_per_s is None else f", {brief(run.tokens_per_s)} tokens/s"
    print(f"{counted(len(run.steps), 'step')} in {brief(seconds)} s{speed}; {_losses(run.evaluations)}")


def _losses(held_out: Sequence[Evaluation]) -> str:
    """The loss on what was held out, before the first step and when it was measured last."""
    if not held_out:
        return "stopped before the loss on what was held out was measured"
    first, *others = (f"{each.loss:.3f}" for each in held_out)
    after = f"to {others[-1]}" if others else "at first; stopped before it was measured again"
    return f"loss on what was held out {first} {after}"


COMMAND = Command("train", "train a small model, or one of your own on a file", GUIDE, add_arguments, run)
