"""Train the demo model on the encoded corpus and keep the weights with the lowest validation loss.

    python tools/train_demo/train.py [--data .demo_data] [--out eet_lab/models/demo]

`eet_lab.training` trains it, in bfloat16 with weights in fp32 beside. Writes an fp16 HF checkpoint, and `training.json`
with the figures for the model card. The corpus is small and is read many times over, so dropout and weight decay are
high; text of whole sources is mixed in, less of it from step to step. `--below LOSS` writes nothing unless the test
loss is as low as that, such as that of the model that is there.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from eet_lab.bench.measured import device_name
from eet_lab.models import Model
from eet_lab.models.config import Config
from eet_lab.models.decoder import Decoder, mapped
from eet_lab.models.weights import placed, untrained
from eet_lab.technique import Recipe
from eet_lab.training import Evaluation, Example, Rows, Trainer, TrainSettings, train

END_OF_TEXT = 0
CONFIG = Config(4, 256, 4, 1024, 4096, 1024, bos_id=END_OF_TEXT, eos_id=END_OF_TEXT)
SETTINGS = ("steps", "batch", "learning_rate", "weight_decay", "dropout", "sources", "seed")
EVALUATE_EVERY = 250
WARM_UP_STEPS = 100


def load_tokens(path: Path) -> np.ndarray:
    return np.fromfile(path, dtype=np.uint16).astype(np.int64)


class Windows:
    """Random windows of one token stream; every second one begins where a document does, as prompts do."""

    def __init__(self, tokens: np.ndarray) -> None:
        # Wrapping around lets a document near the end open a full window too.
        self.tokens = np.concatenate((tokens, tokens[: CONFIG.context]))
        self.num_tokens = len(tokens)
        self.documents = np.flatnonzero(tokens == END_OF_TEXT)

    def draw(self, count: int, draw: np.random.Generator) -> Iterable[Example]:
        starts = draw.integers(self.num_tokens, size=count)
        starts[::2] = draw.choice(self.documents, len(starts[::2]))
        return (Example(self.tokens[start : start + CONFIG.context].tolist()) for start in starts)


@dataclass(frozen=True)
class Mixed:
    """What each step reads: prose, and sources, whose share falls by a half."""

    prose: Windows
    sources: Windows
    share: float
    steps: int
    seed: int

    def batch(self, step: int, num_rows: int) -> list[Example]:
        draw, num_sources = np.random.default_rng((self.seed, step)), self.num_sources(step, num_rows)
        return [*self.prose.draw(num_rows - num_sources, draw), *self.sources.draw(num_sources, draw)]

    def num_sources(self, step: int, num_rows: int) -> int:
        return round(num_rows * (self.share - 0.5 * step / self.steps))


def evaluate(network: Decoder, tokens: np.ndarray) -> float:
    """Mean loss in nats per token over consecutive full windows; a shorter rest is left out."""
    recipe = Recipe.parse("pre_padding,mask_removal,packed_prefill,chunked_cross_entropy")  # which take weights in fp32
    return Trainer(network, recipe.parts).evaluate([*Rows(tokens, CONFIG.context)])


def trained(trainer: Trainer) -> Decoder:
    """A copy of the weights in fp32, as they were before they were rounded."""
    state = trainer.optimizer.state
    wide = {id(p): state[p].get("master", p).detach().float().clone() for p in trainer.parameters.values()}
    return mapped(trainer.model, lambda tensor: wide[id(tensor)] if id(tensor) in wide else tensor.float())


def train_model(args: argparse.Namespace) -> tuple[Decoder, list[dict[str, float]]]:
    prose, sources = (Windows(load_tokens(args.data / f"{name}.bin")) for name in ("train", "sources"))
    rows = Mixed(prose, sources, share=args.sources, steps=args.steps, seed=args.seed)
    network = untrained(CONFIG, args.seed, torch.device(args.device), getattr(torch, args.dtype))
    settings = TrainSettings(
        lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, dropout=args.dropout,
        warmup_steps=min(WARM_UP_STEPS, args.steps), lr_schedule="cosine", max_steps=args.steps, seed=args.seed,
    )  # fmt: skip
    recipe = Recipe.parse(args.recipe, args.device, CONFIG.in_training)
    print("techniques:", recipe, flush=True)
    trainer, curve = Trainer(network, recipe.parts, settings=settings), list[dict[str, float]]()
    best, losses = trained(trainer), list[float]()

    def look(found: Evaluation) -> None:
        nonlocal best
        if not curve or found.loss < min(point["validation_loss"] for point in curve):
            best = trained(trainer)
        if found.num_steps:
            curve.append({"step": found.num_steps, "training_loss": losses[-1], "validation_loss": found.loss})
            print(" ".join(f"{key} {value:.4g}" for key, value in curve[-1].items()), flush=True)

    train(
        trainer, rows, max_steps=args.steps, batch_rows=args.batch, evaluate_every=EVALUATE_EVERY,
        held_out=Rows(load_tokens(args.data / "validation.bin"), CONFIG.context), on_evaluation=look,
        on_step=lambda step: losses.append(step.loss),
    )  # fmt: skip
    return best, curve


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(".demo_data"))
    parser.add_argument("--out", type=Path, default=Path("eet_lab/models/demo"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--recipe", default="all", help="techniques of training")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--sources", type=float, default=0.8, help="share of code at first; it falls by 0.5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--below", type=float, help="write nothing if the test loss is above")
    args = parser.parse_args()

    start = time.perf_counter()
    network, curve = train_model(args)
    training_s = time.perf_counter() - start
    losses = {
        name: evaluate(network, load_tokens(args.data / f"{name}.bin")) for name in ("train", "validation", "test")
    }
    figures: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": device_name(args.device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "corpus": json.loads((args.data / "corpus.json").read_text()),
        "num_parameters": CONFIG.num_params,
        "settings": {name: vars(args)[name] for name in SETTINGS},
        "training_s": round(training_s, 1),
        "best_step": min(curve, key=lambda point: point["validation_loss"])["step"],
        "loss": losses,
        "curve": curve,
    }
    print(json.dumps({name: figures[name] for name in ("loss", "training_s", "best_step")}, indent=1))
    if args.below is not None and losses["test"] > args.below:
        print(f"The test loss is above {args.below}: nothing is written.")
        return
    half = placed(network, network.device, torch.float16)
    Model("demo", "demo", half, None, "random").save(args.out)
    for path in sorted((args.data / "model").iterdir()):
        shutil.copyfile(path, args.out / path.name)
    (args.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
