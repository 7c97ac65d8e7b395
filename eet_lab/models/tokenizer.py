"""Text to token ids and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from eet_lab.errors import ModelError

UNKNOWN = re.compile(r"⟨\d+⟩")
"""What `decode` makes of a token that the vocabulary does not have."""


class Tokenizer:
    """A thin cover over a Hugging Face tokenizer. Special tokens are shown; unknown ids decode to ⟨id⟩."""

    def __init__(self, encode: Any, decode: Any, num_words: int) -> None:
        self._encode, self._decode, self.num_words = encode, decode, num_words

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint: tokenizer.json, or GPT-2's vocab.json with merges.txt, or None."""
        from tokenizers import ByteLevelBPETokenizer
        from tokenizers import Tokenizer as Fast

        try:
            if (folder / "tokenizer.json").exists():
                return cls.of(Fast.from_file(str(folder / "tokenizer.json")))
            if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
                return cls.of(ByteLevelBPETokenizer.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(f"The tokenizer in {folder} cannot be read: {error}") from error
        return None

    @classmethod
    def of(cls, tokenizer: Any) -> Tokenizer:
        """From a `tokenizers` tokenizer, or one of transformers."""
        if isinstance(tokenizer, cls):
            return tokenizer
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        if hasattr(tokenizer, "get_vocab_size"):
            return cls(lambda text: tokenizer.encode(text).ids, decode, tokenizer.get_vocab_size())
        return cls(tokenizer.encode, decode, len(tokenizer))

    def encode(self, text: str) -> list[int]:
        return list(self._encode(text)) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        text: list[str] = []
        run: list[int] = []
        for token in [*ids, None]:
            if token is not None and token < self.num_words:
                run.append(token)
                continue
            text.append(self._decode(run) if run else "")
            text.append("" if token is None else f"⟨{token}⟩")
            run = []
        return "".join(text)
