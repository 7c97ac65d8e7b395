"""What a run is asked to do, and the checks that stand before any work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from reprlib import repr as shortened
from typing import Any

import torch

from eet_lab.errors import OutOfMemory, PromptError, did_you_mean
from eet_lab.models.config import Config
from eet_lab.models.decoder import Decoder
from eet_lab.monitor.free import free_bytes_of
from eet_lab.ops.types import Sampling

COLDEST = 1e-4
"""The lowest temperature that still draws: far below it, scores overflow in fp32."""


@dataclass(frozen=True)
class Settings:
    """How to generate: greedy at temperature 0 (the default), else a draw after temperature, top-k and top-p.

    `stop` holds token ids that end a row (the stop token is kept, as in transformers); the seed makes draws repeatable.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": (_whole(self.max_new_tokens, 1), "a whole number of at least 1"),
            "temperature": (
                _real(self.temperature) and (self.temperature == 0 or self.temperature >= COLDEST),
                f"0 (greedy) or a finite number of at least {COLDEST}",
            ),
            "top_k": (_whole(self.top_k, 0), "0 (no limit) or a positive whole number"),
            "top_p": (_real(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1 (no limit)"),
            "seed": (_whole(self.seed, 0) and self.seed < 2**62, "a whole number from 0 to 2**62 - 1"),
        }
        for name, (fine, limit) in limits.items():
            if not fine:
                raise PromptError(f"{name} is {getattr(self, name)!r}, but it must be {limit}.")
        object.__setattr__(self, "stop", tuple(self.stop))
        if bad := [token for token in self.stop if not _whole(token, 0)]:
            raise PromptError(f"stop holds {bad[0]!r}, but stop tokens are token ids: whole numbers from 0.")

    @classmethod
    def of(cls, **settings: Any) -> Settings:
        """Settings from keywords; PromptError names one that does not exist."""
        names = [f.name for f in fields(cls)]
        if unknown := [name for name in settings if name not in names]:
            hint = did_you_mean(unknown[0], names)
            raise PromptError(f"There is no setting {unknown[0]!r}.{hint} There are {', '.join(names)}.")
        return cls(**settings)

    def sampling(self, device: torch.device) -> Sampling:
        """The same as the ops read it."""
        seed = torch.tensor([self.seed], device=device)
        return Sampling(float(self.temperature), self.top_k, float(self.top_p), seed)


def checked_prompts(prompts: Sequence[Sequence[int]], max_new_tokens: int, config: Config) -> list[list[int]]:
    """The prompts as lists of token ids, an empty one as BOS; PromptError for what cannot run."""
    if not prompts:
        raise PromptError("There are no prompts; give at least one (an empty one starts from BOS).")
    for number, prompt in enumerate(prompts, 1):
        if isinstance(prompt, str):
            told = shortened(prompt)
            raise PromptError(f"Prompt {number} is text, {told}; an engine takes tokens: model.encode(text).")
    rows = [list(prompt) or [config.bos_id] for prompt in prompts]
    for number, row in enumerate(rows, 1):
        if set(map(type, row)) == {int} and min(row) >= 0 and max(row) < config.vocab_size:
            continue  # it is checked with every request, so not token by token
        for token in row:
            if not (_whole(token, 0) and token < config.vocab_size):
                raise PromptError(
                    f"Prompt {number} holds the token {token!r}, but the model's vocabulary ends at "
                    f"{config.vocab_size - 1}; was it encoded with another tokenizer?"
                )
    longest = max(range(len(rows)), key=lambda number: len(rows[number]))  # its remedy suits all
    length = len(rows[longest])
    if length + max_new_tokens > config.context:
        raise PromptError(
            f"Prompt {longest + 1} has {length} tokens; with {max_new_tokens} new ones it would pass the model's "
            f"context of {config.context} tokens. {remedy(config.context - length)}"
        )
    return rows


def checked_batch(num_rows: int, prompt_tokens: int, max_new_tokens: int, model: Decoder) -> list[list[int]]:
    """So many prompts of so many BOS; PromptError for what cannot run, OutOfMemory where keys and values alone are too
    many.
    """
    config = model.config
    for name, value in (("num_rows", num_rows), ("prompt_tokens", prompt_tokens)):
        if not _whole(value, 1):
            raise PromptError(f"{name} is {shortened(value)}, but it must be a whole number from 1 on.")
    columns = prompt_tokens + max_new_tokens
    if columns > config.context:
        raise PromptError(
            f"prompt_tokens is {prompt_tokens:,}; with {max_new_tokens} new ones it would pass the model's context of "
            f"{config.context} tokens. {remedy(config.context - prompt_tokens)}"
        )
    row_bytes = columns * config.kv_bytes_per_token(model.dtype.itemsize)
    if num_rows * row_bytes > (free := free_bytes_of(model.device)):
        raise OutOfMemory(
            f"num_rows is {num_rows:,}, but the keys and values of each row take {row_bytes:,} bytes, and {free:,} are "
            f"free. That is room for {free // row_bytes:,} rows at the very most, before activations: Engine.forecast "
            "tells how many would fit. Ask for fewer rows or tokens."
        )
    return [[config.bos_id] * prompt_tokens] * num_rows


def checked_bytes(name: str, value: int | None) -> None:
    """PromptError for what is no number of bytes; None is fine."""
    if value is not None and not _whole(value, 0):
        raise PromptError(f"{name} is {shortened(value)}, but it must be a whole number of bytes from 0 on, or None.")


def remedy(room: int) -> str:
    """What to do about a prompt that leaves room for so many new tokens."""
    return f"Ask for at most {room} new tokens, or shorten it." if room > 0 else "Shorten the prompt."


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _real(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
