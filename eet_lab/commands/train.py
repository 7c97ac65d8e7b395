"""`eet-lab train`: small models that are trained here from nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eet_lab.commands.arguments import add_model, add_recipe, check_recipe
from eet_lab.commands.command import Command
from eet_lab.commands.terminal import followed

GUIDE = """\
Trains a small model from random weights, on data that is on every machine or is drawn, and tells its loss on what was
held out. Nothing is downloaded.

  eet-lab train translator-tiny                     numbers, from words to digits: a minute or two of a CPU
  eet-lab train vit-tiny --save digits              pictures of digits; a checkpoint that transformers reads
  eet-lab train gpt2-tiny --steps 1000              Python's documentation, read a few times
  eet-lab train gpt2-mini --device cuda --dtype bfloat16 --save writer
  eet-lab generate "The built-in function" --model ./writer --temperature 0.7

Models: gpt2-tiny and, for a GPU, gpt2-mini (the documentation of this Python), bert-tiny (numbers in words and in
digits, some of them masked), translator-tiny, vit-tiny (scikit-learn's handwritten digits where it is installed, and
else drawn ones). Ctrl-C ends the training, and keeps what was learned.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("demo", metavar="NAME", help="which one: see above")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the optimizer (default: the model's own)")
    add_recipe(parser)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the model there when it is done")
    add_model(parser, default=None)


def run(args: argparse.Namespace) -> int:
    """Train and print; 130 when stopped."""
    from eet_lab.devices import checked_device, kind_of
    from eet_lab.errors import ModelError
    from eet_lab.files import check_folder
    from eet_lab.models.loading import checked_dtype
    from eet_lab.progress import Clock
    from eet_lab.technique import Recipe
    from eet_lab.training.demos import demo_of, train_demo
    from eet_lab.words import brief, counted, percent

    check_recipe("--recipe", args.recipe)
    demo, device = demo_of(args.demo), checked_device(args.device)
    demo = demo if args.steps is None else demo.in_steps(args.steps)
    dtype = checked_dtype(args.dtype or "float32", device)
    kind, config = kind_of(device), demo.config.in_training
    recipe = Recipe.parse(args.recipe, kind, config).check(kind, config)
    if args.save:
        check_folder(args.save, "The model", ModelError)  # before there is anything to lose
        if (args.save / "config.json").exists():
            print(f"{args.save} holds a model already, which this one will overwrite.", file=sys.stderr)
    with followed(Clock()) as (line, stop):
        line(0, demo.steps, "reading what was held out")
        found = train_demo(demo, recipe.parts, device=device, dtype=dtype, progress=line, cancel=stop)
    print(f"{demo.title}: {found.model.config.num_params:,} weights, {found.model.dtype} on {device}, {recipe}")
    if demo.which is not None:
        print(f"data: {demo.which()}")
    steps = counted(len(found.run.steps), "step")
    print(f"{steps} in {brief(found.seconds)} s; {_losses([each.loss for each in found.run.evaluations])}")
    print(f"right: {percent(found.right)} {'of all answers' if demo.is_whole else 'of all that is asked for'}")
    if args.save:
        found.model.save(args.save)
        print(f"saved in {args.save}")
    return 130 if found.run.was_stopped else 0


def _losses(held_out: Sequence[float]) -> str:
    """The loss on what was held out, before the first step and when it was measured last."""
    if not held_out:
        return "stopped before the loss on what was held out was measured"
    first, *others = (f"{loss:.3f}" for loss in held_out)
    after = f"to {others[-1]}" if others else "at first; stopped before it was measured again"
    return f"loss on what was held out {first} {after}"


COMMAND = Command("train", "train a small model from nothing", GUIDE, add_arguments, run)
