"""Train the demo model on the encoded corpus and keep the checkpoint with the lowest validation loss.

    python tools/train_demo/train.py [--data .demo_data] [--out eet_lab/models/demo]

Writes an fp16 HF checkpoint, and `training.json` with the figures for the model card. The corpus is small and
is X
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

END_OF_TEXT = 0
VOCAB_SIZE, NUM_POSITIONS, N_EMBD, N_LAYER, N_HEAD = 4096, 1024, 256, 4, 4
SETTINGS = ("steps", "batch", "learning_rate", "weight_decay", "dropout", "sources", "seed")
EVALUATE_EVERY = 250
WARM_UP_STEPS = 100


def make_model(dropout: float) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB_SIZE,
            n_positions=NUM_POSITIONS,
            n_embd=N_EMBD,
            n_layer=N_LAYER,
            n_head=N_HEAD,
            bos_token_id=END_OF_TEXT,
            eos_token_id=END_OF_TEXT,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )


def load_tokens(path: Path, device: str) -> Tensor:
    return torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int64)).to(device)


class Windows:
    """Random windows of one token stream; every second one begins where a document does, as prompts do."""

    def __init__(self, tokens: Tensor) -> None:
        # Wrapping around lets a document near the end open a full window too.
        self.tokens = torch.cat((tokens, tokens[:NUM_POSITIONS]))
        self.num_tokens = len(tokens)
        self.documents = (tokens == END_OF_TEXT).nonzero().flatten()
        self.offsets = torch.arange(NUM_POSITIONS, device=tokens.device)

    def draw(self, count: int) -> Tensor:
        device = self.tokens.device
        starts = torch.randint(self.num_tokens, (count,), device=device)
        chosen = torch.randint(len(self.documents), (len(starts[::2]),), device=device)
        starts[::2] = self.documents[chosen]
        return self.tokens[starts[:, None] + self.offsets]


@torch.no_grad()
def evaluate(model: GPT2LMHeadModel, tokens: Tensor) -> float:
    """Mean loss in nats per token over consecutive full windows; a shorter rest is left out."""
    model.eval()
    windows = tokens[: len(tokens) // NUM_POSITIONS * NUM_POSITIONS].view(-1, NUM_POSITIONS)
    total = sum(model(batch, labels=batch).loss.item() * len(batch) for batch in windows.split(16))
    model.train()
    return total / len(windows)


def make_optimizer(model: GPT2LMHeadModel, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Decay matrices only: shrinking a norm or a bias regularizes nothing."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def cosine(step: int, num_steps: int) -> float:
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm_up * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / num_steps)))


def train(args: argparse.Namespace) -> tuple[GPT2LMHeadModel, list[dict[str, float]]]:
    torch.manual_seed(args.seed)
    prose = Windows(load_tokens(args.data / "train.bin", args.device))
    sources = Windows(load_tokens(args.data / "sources.bin", args.device))
    validation = load_tokens(args.data / "validation.bin", args.device)
    model = make_model(args.dropout).to(args.device).train()
    optimizer = make_optimizer(model, args.learning_rate, args.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, args.steps))

    best, best_loss, curve = model.state_dict(), math.inf, []
    for step in range(1, args.steps + 1):
        num_sources = round(args.batch * (args.sources - 0.5 * step / args.steps))
        batch = torch.cat((prose.draw(args.batch - num_sources), sources.draw(num_sources)))
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % EVALUATE_EVERY == 0 or step == args.steps:
            validation_loss = evaluate(model, validation)
            curve.append({"step": step, "training_loss": loss.item(), "validation_loss": validation_loss})
            print(" ".join(f"{key} {value:.4g}" for key, value in curve[-1].items()), flush=True)
            if validation_loss < best_loss:
                best_loss, best = validation_loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(best)
    return model, curve


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(".demo_data"))
    parser.add_argument("--out", type=Path, default=Path("eet_lab/models/demo"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--sources", type=float, default=0.8, help="share of code at first; it falls by 0.5")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    start = time.perf_counter()
    model, curve = train(args)
    training_s = time.perf_counter() - start
    args.out.mkdir(parents=True, exist_ok=True)
    model.config.activation_function = "gelu_new"  # the name that every reader of GPT-2 knows
    model.half().save_pretrained(args.out)
    for path in sorted((args.data / "model").iterdir()):
        shutil.copyfile(path, args.out / path.name)

    model.float().eval()
    losses = {
        name: evaluate(model, load_tokens(args.data / f"{name}.bin", args.device))
        for name in ("train", "validation", "test")
    }
    figures = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": torch.cuda.get_device_name() if args.device == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "corpus": json.loads((args.data / "corpus.json").read_text()),
        "num_parameters": model.num_parameters(),
        "settings": {name: vars(args)[name] for name in SETTINGS},
        "training_s": round(training_s, 1),
        "best_step": min(curve, key=lambda point: point["validation_loss"])["step"],
        "loss": losses,
        "curve": curve,
    }
    (args.out / "training.json").write_text(json.dumps(figures, indent=1) + "\n")
    shown = ("loss", "training_s", "best_step")
    print(json.dumps({name: figures[name] for name in shown}, indent=1))


if __name__ == "__main__":
    main()
