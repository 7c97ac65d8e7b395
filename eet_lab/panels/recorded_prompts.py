"""A recording's prompts where its model is not the one that is loaded: as token ids, since its words are not known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eet_lab.bench import Workload
from eet_lab.errors import PromptError
from eet_lab.models.config import PRESETS
from eet_lab.models.load import DEMO_LABEL, RANDOM_LABEL, demo_tokenizer
from eet_lab.models.tokenizer import UNKNOWN, Tokenizer
from eet_lab.panels.jobs import decoder
from eet_lab.panels.recordings import Result
from eet_lab.words import counted


def as_ids(result: Result) -> tuple[str, ...]:
    """Each prompt in the notation of `decoder(None)`.

    A result keeps prompts as texts. The demo model and random weights share a vocabulary that is always there, so ids
    of their prompts can be found again. Where they cannot, a whole text stays, and of one in pieces only the number of
    its tokens is told.
    """
    label = result.environment.model_label
    tokenizer = demo_tokenizer() if label == DEMO_LABEL or label.endswith(RANDOM_LABEL) else None
    written = decoder(None)
    return tuple(
        written(ids) if ids else f"{counted(length, 'token') if UNKNOWN.search(text) else text} "
        for ids, text, length in zip(_found(result, tokenizer), result.prompts, result.prompt_lengths, strict=True)
    )


def _found(result: Result, tokenizer: Tokenizer | None) -> Iterator[Sequence[int]]:
    """The ids of each prompt, known to give its text; none where there are no such."""
    drawn = _drawn(result)
    for row, (text, length) in enumerate(zip(result.prompts, result.prompt_lengths, strict=True)):
        likely = [*drawn[row : row + 1], tokenizer.encode(text)] if tokenizer else []
        right = (ids for ids in likely if tokenizer and len(ids) == length and tokenizer.decode(ids) == text)
        yield next(right, ())


def _drawn(result: Result) -> list[list[int]]:
    """The random prompts of a workload of that name; none where prompts have other lengths, and so were chosen."""
    config = PRESETS.get(result.environment.model)
    try:
        workload = Workload.parse(result.workload)
    except PromptError:
        return []
    same = workload.lengths == tuple(result.prompt_lengths)
    return workload.prompts(config.vocab_size) if config and same else []
