"""Sample from the trained demo model and write its card from `training.json`.

    python tools/train_demo/card.py [--model eet_lab/models/demo]

The samples are added to `training.json`; `render` turns that file alone into the card, so the two cannot differ.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

PROMPTS = ("Return a list of", "The module provides", "class for", "Raise an exception if")
NUM_SAMPLE_TOKENS = 48
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 40},
}

CARD = """\
---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# EET Lab demo model

A small GPT-2 that writes something like Python documentation. It ships with EET Lab so that a first run needs no
network. Every figure below is rendered from `training.json` by `tools/train_demo/card.py`.

**Use it** to learn how inference works and to time it. **Do not use it** for knowledge: it knows the tone of
documentation and none of the facts, invents functions, and repeats itself, above all when it decodes greedily.

## Architecture

GPT-2, {num_parameters:,} parameters with the tied embedding counted once: {n_layer} layers, {n_head} heads
of {head_dim}, {n_embd} channels, {n_positions:,} positions; byte-level BPE of {vocab_size:,} tokens, of which
`<|endoftext|>` is both BOS and EOS. Stored in fp16; on a CPU, load it with
`GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32)`.

## Data

Text that comes with Python {corpus[python]} itself: docstrings, comments that read as prose, and the language reference
of `pydoc_data.topics`. Splits are made by module (a module's private twin and its `test_` module go with it), and
what repeats a long line of the training text was dropped from the other two, which hold no tests' text either. The
training modules' whole source code was mixed in. `heldout.jsonl` is every seventh document of the test split: EET
Lab reads it to tell what a lossy technique does to the perplexity.

| split | modules | documents | characters | tokens |
|---|---|---|---|---|
{splits}

Python and its documentation are under the PSF License Version 2: see `LICENSE.md`.

## Training

`eet_lab.training` took **{training_s:.0f} s** for {settings[steps]:,} steps of {settings[batch]} windows of
{n_positions:,} tokens, on one {hardware}, on {date} (torch {versions[torch]}).
In bf16, with the weights in fp32 beside; begun with GPT-2's own initialization. AdamW, learning rate
{settings[learning_rate]} with warm-up and cosine decay, weight decay {settings[weight_decay]}; dropout
{settings[dropout]} of hidden states, none of attention's weights. The share of source code fell from
{share_first:.0%} to {share_last:.0%}. Kept: step {best_step:,}, which has the lowest validation loss; the test split
chose nothing.

| split | loss, nats per token | perplexity | bits per character |
|---|---|---|---|
{losses}

## Samples

First runs, not picked: greedy, and sampled at temperature 0.8 and top-k 40 with seed 0, up to
{num_sample_tokens} new tokens.

{samples}
## Limits

English and Python only; {corpus[train][tokens]:,} tokens of prose are very little, so it copies phrases of its
training text and soon loses the thread. It was not tuned to be helpful or safe. Names, signatures and behaviour
that it states are made up.
"""


def sample(folder: Path) -> list[dict[str, str]]:
    """Continue each prompt in each way of `DECODING`, in fp32 on the CPU."""
    import torch
    from transformers import AutoTokenizer, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        row = {"prompt": prompt}
        for name, options in DECODING.items():
            torch.manual_seed(0)
            tokens = model.generate(**inputs, max_new_tokens=NUM_SAMPLE_TOKENS, pad_token_id=0, **options)
            row[name] = tokenizer.decode(tokens[0], skip_special_tokens=True)
        rows.append(row)
    return rows


def render(training: dict[str, Any], config: dict[str, Any]) -> str:
    """The model card, from `training.json` and the model's `config.json`."""
    corpus, loss, settings = training["corpus"], training["loss"], training["settings"]
    columns = ("modules", "documents", "characters", "tokens")
    splits = [
        " | ".join([f"| {name}", *(f"{corpus[name][column]:,}" for column in columns)]) + " |"
        for name in ("train", "validation", "test", "sources")
    ]
    losses = []
    for name, nats in loss.items():
        bits = nats / math.log(2) * corpus[name]["tokens"] / corpus[name]["characters"]
        losses.append(f"| {name} | {nats:.3f} | {math.exp(nats):.1f} | {bits:.2f} |")
    samples = [
        f"*{row['prompt']}*, {name}:\n\n```text\n{row[name]}\n```\n" for row in training["samples"] for name in DECODING
    ]
    return CARD.format(
        **{**config, **training, "splits": "\n".join(splits), "losses": "\n".join(losses)}
        | {"samples": "\n".join(samples), "head_dim": config["n_embd"] // config["n_head"]}
        | {"share_first": settings["sources"], "share_last": settings["sources"] - 0.5}
        | {"num_sample_tokens": NUM_SAMPLE_TOKENS},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("eet_lab/models/demo"))
    folder: Path = parser.parse_args().model
    path = folder / "training.json"
    training = json.loads(path.read_text(encoding="utf-8"))
    training["samples"] = sample(folder)
    path.write_text(json.dumps(training, indent=1) + "\n", encoding="utf-8")
    config = json.loads((folder / "config.json").read_text())
    (folder / "README.md").write_text(render(training, config), encoding="utf-8")


if __name__ == "__main__":
    main()
