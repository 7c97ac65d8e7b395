"""Train the demo model's byte-level BPE on the training split and encode every split with it.

    python tools/train_demo/tokenizer.py [--data .demo_data] [--vocab-size 4096]

Writes `tokenizer.json` and `tokenizer_config.json` to DATA/model, and one `.bin` file of uint16 tokens per
split, in which `<|endoftext|>` stands before every document: it is the model's BOS and its EOS.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
NUM_POSITIONS = 1024


def read_texts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """GPT-2's scheme: bytes as the alphabet, words kept with their leading space, no normalization."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "model_max_length": NUM_POSITIONS,
        "clean_up_tokenization_spaces": False,
        # GPT-2 would embed the token types that transformers 4 gives else.
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode(tokenizer: Tokenizer, texts: Iterator[str]) -> np.ndarray:
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch(list(texts))
    tokens = [token for encoding in encodings for token in (end_of_text, *encoding.ids)]
    return np.array(tokens, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(".demo_data"))
    parser.add_argument("--vocab-size", type=int, default=4096)
    args = parser.parse_args()

    tokenizer = train_bpe(read_texts(args.data / "train.jsonl"), args.vocab_size)
    save(tokenizer, args.data / "model")
    facts = json.loads((args.data / "corpus.json").read_text())
    for name in ("train", "validation", "test", "sources"):
        tokens = encode(tokenizer, read_texts(args.data / f"{name}.jsonl"))
        tokens.tofile(args.data / f"{name}.bin")
        facts[name]["tokens"] = len(tokens)
        ratio = facts[name]["characters"] / len(tokens)
        print(f"{name}: {len(tokens):,} tokens, {ratio:.2f} characters each")
    (args.data / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
