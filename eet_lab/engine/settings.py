"""What a run is asked to do, and the checks that stand before any work."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from eet_lab.errors import PromptError, did_you_mean
from eet_lab.scheduling.request import to_fit
from eet_lab.scheduling.whole import MOST, MOST_SEED, is_real, is_whole
from eet_lab.words import counted, told, type_of

if TYPE_CHECKING:  # a server's front has settings, and no torch
    import torch

    from eet_lab.models.config import Config
    from eet_lab.ops.types import Choice, Sampling

MOST_LOGPROBS = 20
"""The most tokens that are told beside a chosen one: OpenAI's limit for chats, and vLLM's default."""
COLDEST = 1e-4
"""The lowest temperature that still draws: far below it, scores overflow in fp32."""
HOTTEST = 1e4
"""The highest one: every token is as likely as the others by then, and far above it fp32 ends."""
Called = Callable[[int], str]
"""What an error calls a text, by its number from 1."""
WRITTEN = np.dtype([("kind", "u1"), ("value", "<i4")])
"""What marshal makes of an int of 32 bits, and of a list, whose items follow."""


@dataclass(frozen=True)
class Settings:
    """How to generate: greedy at temperature 0 (the default), else a draw after temperature, top-k and top-p.

    `stop` holds token ids that end a row (the stop token is kept, as in transformers); the seed makes draws repeatable.
    `logprobs` asks for the log-probability of each token, and of so many of the likeliest in its place (0: of none):
    those of the raw logits, before temperature, top-k and top-p, as in vLLM. A step for such a row computes the logits
    once more.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        limits = {
            "max_new_tokens": (is_whole(self.max_new_tokens, 1, MOST), f"a whole number from 1 to {MOST:,}"),
            "temperature": (
                is_real(self.temperature) and (self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST),
                f"0 (greedy) or from {COLDEST} to {HOTTEST:,.0f}",
            ),
            "top_k": (is_whole(self.top_k, 0, MOST), f"0 (no limit) or a whole number up to {MOST:,}"),
            "top_p": (is_real(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1 (no limit)"),
            "seed": (is_whole(self.seed, 0, MOST_SEED), f"a whole number from 0 to {MOST_SEED:,}"),
            "logprobs": (
                self.logprobs is None or is_whole(self.logprobs, 0, MOST_LOGPROBS),
                f"None (not wanted) or a whole number from 0 to {MOST_LOGPROBS}",
            ),
        }
        for name, (fine, limit) in limits.items():
            if not fine:
                raise PromptError(f"{name} is {told(getattr(self, name))}, but it must be {limit}.")
        if not isinstance(self.stop, Iterable):
            some = f"({told(self.stop)},)" if is_whole(self.stop, 0) else "() for none"
            raise PromptError(f"stop is {told(self.stop)}, but it must be token ids in a tuple: {some}.")
        object.__setattr__(self, "stop", tuple(self.stop))
        if bad := [token for token in self.stop if not is_whole(token, 0, MOST)]:
            raise PromptError(f"stop holds {told(bad[0])}, but stop tokens are token ids: whole numbers from 0.")

    @classmethod
    def of(cls, **settings: Any) -> Settings:
        """Settings from keywords; PromptError names one that does not exist."""
        names = [f.name for f in fields(cls)]
        if unknown := [name for name in settings if name not in names]:
            hint = did_you_mean(unknown[0], names)
            raise PromptError(f"There is no setting {unknown[0]!r}.{hint} There are {', '.join(names)}.")
        return cls(**settings)

    @property
    def asked(self) -> tuple[float, int, float]:
        """How tokens are chosen, but for the seed: temperature, top-k and top-p."""
        return float(self.temperature), self.top_k, float(self.top_p)

    def choice(self, num_tokens: int) -> Choice:
        """The plainest choice that does, among so many tokens."""
        from eet_lab.ops.types import Choice

        return Choice.of(*self.asked, num_tokens)

    def sampling(self, num_rows: int, device: torch.device | str = "cpu", num_tokens: int = MOST) -> Sampling:
        """The same as the ops read it, for a batch of so many rows; a top-k of `num_tokens`, all there are, is none."""
        from eet_lab.ops.reference import noise_keys
        from eet_lab.ops.types import Sampling

        return Sampling.of(noise_keys(self.seed, num_rows, device), [self.asked] * num_rows, num_tokens)


def checked_settings(settings: Settings | None) -> Settings:
    """The same, or the default ones; PromptError for what is none."""
    if settings is None or isinstance(settings, Settings):
        return settings or Settings()
    how = "Settings(**settings)" if isinstance(settings, dict) else "such as Settings(max_new_tokens=64)"
    raise PromptError(f"settings is {told(settings)}, but it must be Settings, {how}.")


def checked_each(settings: Settings | Sequence[Settings] | None) -> Settings | list[Settings]:
    """The same, or the default ones; PromptError for what is neither Settings nor a list of them."""
    if _is_list(settings):
        return [checked_settings(each) for each in settings]  # type: ignore[union-attr]
    return checked_settings(settings)  # type: ignore[arg-type]


def one_each(settings: Settings | Sequence[Settings], num_prompts: int) -> list[Settings]:
    """The settings of each prompt, which may all have the same."""
    return [settings] * num_prompts if isinstance(settings, Settings) else list(settings)


def of_all(lengths: Sequence[int], each: Sequence[Settings], context: int) -> Settings:
    """Settings with which prompts of such lengths need what they do with their own, or somewhat more."""
    most = max(each, key=lambda settings: settings.choice(MOST))
    new_tokens = max(settings.max_new_tokens for settings in each)
    return replace(most, max_new_tokens=min(new_tokens, context - max(lengths)), stop=())


def checked_prompts(
    prompts: Sequence[Sequence[int]], settings: Settings | Sequence[Settings], config: Config
) -> list[list[int]]:
    """The prompts as lists of token ids, an empty one as BOS; PromptError for what cannot run."""
    given = _checked_rows("prompts", "Prompt {}".format, prompts, config)
    if not all(given) and (config.unknown_bos_id is not None or not config.has_bos):
        ends = f"in the checkpoint's config, and the vocabulary ends at {config.vocab_size - 1:,}"
        bos = "missing in the checkpoint's config" if not config.has_bos else f"{config.unknown_bos_id:,} {ends}"
        raise PromptError(
            f"Prompt {given.index([]) + 1} is empty, and would start from BOS, but bos_token_id is {bos}. Give the "
            "prompt a token, or correct the config."
        )
    rows = [row or [config.bos_id] for row in given]
    if not rows:
        raise PromptError("There are no prompts; give at least one (an empty one starts from BOS).")
    each = one_each(settings, len(rows))
    if len(each) != len(rows):
        raise PromptError(
            f"settings has {len(each)} Settings for {counted(len(rows), 'prompt')}; give each prompt its own, or one "
            "Settings for all."
        )
    full = [len(row) + asked.max_new_tokens for row, asked in zip(rows, each, strict=True)]
    longest = full.index(max(full))  # its remedy suits all
    if full[longest] > config.context:
        length, new_tokens = len(rows[longest]), each[longest].max_new_tokens
        raise PromptError(
            f"Prompt {longest + 1} has {counted(length, 'token')}; with {new_tokens:,} new ones it would pass the "
            f"{config.limit}. {to_fit(config.context - length)}"
        )
    return rows


def checked_forced(forced: Sequence[Sequence[int]], each: Sequence[Settings], config: Config) -> list[list[int]]:
    """What shall be generated, as lists of token ids, one for each prompt; PromptError for what is not that."""
    rows = _checked_rows("forced", "Row {} of forced".format, forced, config)
    if len(rows) != len(each):
        raise PromptError(
            f"forced has {counted(len(rows), 'row')} for {counted(len(each), 'prompt')}; give each prompt a row."
        )
    for number, (row, settings) in enumerate(zip(rows, each, strict=True), 1):
        if len(row) != settings.max_new_tokens:
            raise PromptError(
                f"Row {number} of forced has {counted(len(row), 'token')}, but max_new_tokens is "
                f"{settings.max_new_tokens}; give as many."
            )
    return rows


def _checked_rows(name: str, called: Called, rows: Sequence[Sequence[int]], config: Config) -> list[list[int]]:
    """Lists of token ids as they are; PromptError for what are none."""
    if isinstance(rows, str):
        raise PromptError(f"{name} is text, {told(rows)}; an engine takes tokens: [model.encode(text)].")
    if not _is_list(rows):
        raise PromptError(f"{name} is {_named(rows)}, but it must be a list of lists of token ids{_listed(rows)}.")
    if _numbers(rows, config.vocab_size) is not None:
        return [row[:] for row in rows]  # type: ignore[misc]
    for number, row in enumerate(rows, 1):
        who = called(number)
        if isinstance(row, str):
            raise PromptError(f"{who} is text, {told(row)}; an engine takes tokens: model.encode(text).")
        if not _is_list(row):
            alone = "; a single prompt is a list in a list: [[1, 2, 3]]" if isinstance(row, int) else ""
            raise PromptError(f"{who} is {_named(row)}, but it must be a list of token ids{_listed(row)}{alone}.")
        for token in row:
            if not isinstance(token, int) or isinstance(token, bool):
                raise PromptError(f"{who} holds {told(token)}, but token ids are ints; an array's tolist() gives them.")
    for number, row in enumerate(rows, 1):
        check_vocabulary(called(number), row, config.vocab_size)
    return list(map(list, rows))


def check_vocabulary(who: str, tokens: Iterable[int], vocab_size: int) -> None:
    """PromptError for a token id outside the vocabulary; `who` is what holds it."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise PromptError(
                f"{who} holds the token {told(token)}, but the model's vocabulary ends at {vocab_size - 1}; was it "
                "encoded with another tokenizer?"
            )


def _numbers(rows: Sequence[Sequence[int]], vocab_size: int) -> np.ndarray | None:
    """All tokens of lists of ints of the vocabulary, end to end; None for anything else.

    Every request is asked. One call tells the types of all numbers and what they are: marshal writes an int of 32 bits
    in five bytes, the first of which says so, and a list as five bytes, with its length, before its items.
    """
    try:
        written = marshal.dumps([*rows], 2)
    except ValueError:
        return None
    if len(written) % WRITTEN.itemsize:
        return None
    items = np.frombuffer(written, WRITTEN)
    is_int, is_list = items["kind"] == ord("i"), items["kind"] == ord("[")
    begins = np.flatnonzero(is_list)[1:]  # of the rows; the first list is that of all
    counts = items["value"][begins].astype(np.int64)
    ends = 1 + (counts + 1).cumsum()
    flat = len(begins) == len(rows) and np.array_equal(begins, ends - counts - 1) and bool((is_int | is_list).all())
    if not flat or len(items) != ends.max(initial=1):
        return None
    numbers = items["value"][is_int].astype(np.int64)
    return numbers if numbers.min(initial=0) >= 0 and numbers.max(initial=0) < vocab_size else None


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _named(value: object) -> str:
    return type_of(value) if hasattr(value, "tolist") else told(value)


def _listed(value: object) -> str:
    return ", such as its tolist()" if hasattr(value, "tolist") else ""


def checked_columns(num_rows: int, prompt_tokens: int, max_new_tokens: int, config: Config) -> int:
    """The columns of a batch of `num_rows` prompts, each of `prompt_tokens`; PromptError for one that cannot run."""
    for name, value in (("num_rows", num_rows), ("prompt_tokens", prompt_tokens)):
        if not is_whole(value, 1):
            raise PromptError(f"{name} is {told(value)}, but it must be a whole number from 1 on.")
    columns = prompt_tokens + max_new_tokens
    if columns > config.context:
        raise PromptError(
            f"prompt_tokens is {prompt_tokens:,}; with {max_new_tokens:,} new ones it would pass the "
            f"{config.limit}. {to_fit(config.context - prompt_tokens)}"
        )
    return columns


def checked_texts(
    texts: Sequence[Sequence[int]],
    config: Config,
    truncate: bool = False,
    cut_by: str = "truncate=True",
    called: Called = "Text {}".format,
) -> list[Sequence[int]]:
    """What an encoder reads, as lists or arrays of token ids that no one else has; PromptError for what it cannot read.

    `truncate` cuts what is longer than the context; its last token stays, which marks a text's end. `cut_by` is how
    whoever gave them asks for that.
    """
    numbers = _numbers(texts, config.vocab_size)
    if numbers is None:
        rows: Sequence[Any] = _checked_rows("texts", called, texts, config)
    else:
        rows = [numbers[end - len(text) : end] for text, end in zip(texts, accumulate(map(len, texts)), strict=True)]
    for number, row in enumerate(rows, 1):
        if not len(row):
            raise PromptError(
                f"{called(number)} has no tokens; give it one at least, such as the one that begins a text."
            )
        if len(row) > config.context and not truncate:
            raise PromptError(
                f"{called(number)} has {len(row):,} tokens, but this encoder reads at most {config.context:,}. Shorten "
                f"it, or cut all texts with {cut_by}."
            )
    return [row if len(row) <= config.context else [*row[: config.context - 1], row[-1]] for row in rows]


def checked_bytes(name: str, value: int | None) -> None:
    """PromptError for what is no number of bytes; None is fine."""
    if value is not None and not is_whole(value, 0):
        raise PromptError(f"{name} is {told(value)}, but it must be a whole number of bytes from 0 on, or None.")
