"""A request, as the scheduler counts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from eet_lab.errors import PromptError
from eet_lab.scheduling.whole import MOST, check_whole
from eet_lab.words import counted, told

Status = Literal["new", "waiting", "running", "finished"]
FinishReason = Literal["length", "stop", "cancelled"]


class TokenLogprobs(NamedTuple):
    """The log-probability of a generated token, and ids and theirs of the likeliest in its place, largest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False, repr=False)
class Request:
    """A prompt on its way to `max_new_tokens` more. There is no prefill phase and no decode phase.

    A row reads tokens `read .. read + n - 1`; a pass that has then read all of them tells the next one. Token values
    stay on the device and come to the host some steps late, so these counts never depend on a value.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    generated: list[int] = field(init=False, default_factory=list)  # values that have come to the host; the engine's
    logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)  # of these, if it asked for them
    finish_reason: FinishReason | None = field(init=False, default=None)  # once nothing more will come to the host
    length: int = field(init=False)  # tokens that exist: the prompt, and what was told, on the device or here
    read: int = field(init=False, default=0)  # tokens whose keys and values are in the cache
    cached: int = field(init=False, default=0)  # those of them that were there when it got its slot
    slot: int | None = field(init=False, default=None)  # its row of the device's token buffer, while it runs
    pad: int = field(init=False, default=0)  # columns of the KV cache before its first token
    status: Status = field(init=False, default="new")
    full_length: int = field(init=False)  # with all that may be told

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, Sequence) or isinstance(self.prompt, (str, bytes)):
            raise PromptError(f"prompt is {told(self.prompt)}, but it must be a tuple of token ids.")
        if not self.prompt:
            raise PromptError("prompt has no token, but a first one must be read; give at least BOS.")
        check_whole(PromptError, "max_new_tokens", self.max_new_tokens, 1, MOST)
        self.prompt = tuple(self.prompt)
        self.length = len(self.prompt)
        self.full_length = self.length + self.max_new_tokens

    def __repr__(self) -> str:
        new = self.length - len(self.prompt)
        prompt = counted(len(self.prompt), "prompt token")
        return f"<Request, {self.status}: {prompt}, {new:,} of {self.max_new_tokens:,} new ones>"

    @property
    def done(self) -> bool:
        """Whether all that will ever come to the host is in `generated`."""
        return self.finish_reason is not None

    @property
    def known(self) -> int:
        """Tokens whose values are on the host. To be read from the start again, all of them must be."""
        return len(self.prompt) + len(self.generated)

    def known_tokens(self, start: int, count: int) -> Sequence[int]:
        """The tokens `start .. start + count - 1`; 0 for those whose values are on the device alone."""
        length = len(self.prompt)
        if start + count <= length:
            return self.prompt if count == length else self.prompt[start : start + count]
        known = [*self.prompt[start:], *self.generated[max(start - length, 0) : start + count - length]]
        return known + [0] * (count - len(known))

    @property
    def num_columns(self) -> int:
        """Columns of the KV cache that it ever fills: nobody needs the keys of its last token, which is not read."""
        return self.full_length - 1


class Row(NamedTuple):
    """What a pass reads of one request: `count` tokens, the first of which is token `start`."""

    request: Request
    slot: int
    start: int
    count: int  # type: ignore[assignment]  # not tuple.count
    tells: bool  # that is all there is to read, so the pass tells the next token


def check_length(request: Request, most: int, limit: str, *others: str) -> None:
    """PromptError for a request of more than `most` tokens, which is `limit`; `others` are further remedies."""
    if request.full_length > most:
        length, new = len(request.prompt), counted(request.max_new_tokens, "new one")
        remedy = to_fit(most - length, *others)
        raise PromptError(f"The prompt has {counted(length, 'token')}; with {new} it would pass {limit}. {remedy}")


def to_fit(room: int, *others: str) -> str:
    """What to do about a prompt that leaves room for so many new tokens."""
    ways = [*([f"ask for at most {counted(room, 'new token')}"] if room > 0 else []), "shorten the prompt", *others]
    remedy = f"{', '.join(ways[:-1])}, or {ways[-1]}" if ways[1:] else ways[0]
    return f"{remedy[0].upper()}{remedy[1:]}."
