"""`truncate_prompt_tokens`, which is vLLM's: how many tokens of a text are kept, and which of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from eet_lab.scheduling.whole import MOST
from eet_lab.serving.errors import bad
from eet_lab.serving.front import Front
from eet_lab.words import told

Given = Sequence[str | list[int]]


def most_of(front: Front, asked: int, room: int, given: Given, what: str) -> int:
    """The most tokens of each text, of which -1 means all that there is `room` for.

    ApiError for a number that cannot be, or that leaves nothing of a text's words. `what` names what is read.
    """
    if asked < 0:
        return room
    marks = len(_marks(front)) if any(isinstance(each, str) for each in given) else 0
    if not marks < asked <= room:
        marked = f", of which {marks:,} mark its beginning and end" if marks else ""
        shown = f"{asked:,}" if asked <= MOST else told(asked)
        raise bad(
            f"truncate_prompt_tokens is {shown}, but {front.name} reads {marks + 1:,} to {room:,} tokens of a "
            f"{what}{marked}. Give one of these numbers, or -1 for the most.",
            "truncate_prompt_tokens",
        )
    return asked


def last_of(front: Front, prompt: str | list[int], ids: list[int], most: int) -> list[int]:
    """The last tokens of a prompt. Of one that came as words, those that mark its beginning stay."""
    if len(ids) <= most:
        return ids
    marks = _marks(front) if isinstance(prompt, str) else []
    pairs = zip(ids, marks, strict=False)
    first = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)][:most]
    return [*first, *ids[len(ids) - most + len(first) :]]


def _marks(front: Front) -> list[int]:
    return [] if front.card.tokenizer is None else front.card.tokenizer.marks
