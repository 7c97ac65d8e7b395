"""What `Trainer.reserve` has seen: the passes that need most memory, and the limit that they are for later ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from eet_lab.errors import TrainingError
from eet_lab.parts.passes import Group
from eet_lab.training.batch import Given, TrainPass
from eet_lab.words import counted


class PassSize(NamedTuple):
    """What the memory of a pass grows with."""

    tokens: int  # of texts and sources, with pads
    labels: int  # with the places that are filled up
    longest: int  # tokens of its longest text or source

    @classmethod
    def of(cls, group: Group) -> PassSize:
        """That of texts that share a pass."""
        longest = max(max(len(text.ids), len(text.source)) for text in group.texts)
        return cls(group.computed_tokens, group.num_asked, longest)

    def or_more(self, other: PassSize | None) -> PassSize:
        """The larger of each."""
        return self if other is None else PassSize(*map(max, self, other))


class Scan:
    """Passes, of which it keeps the largest of each kind of launch: those with most tokens, labels, and length."""

    def __init__(self) -> None:
        self.most: PassSize | None = None
        self._found: dict[tuple[Hashable, str], tuple[PassSize, Given]] = {}

    def add(self, group: Group, kind: Hashable, given: Given) -> None:
        """One more; `given` is what it reads."""
        size = PassSize.of(group)
        self.most = size.or_more(self.most)
        for name, value in size._asdict().items():
            largest = self._found.get((kind, name))
            if largest is None or value > getattr(largest[0], name):
                self._found[kind, name] = size, given

    def largest(self) -> list[Given]:
        """What the largest passes read, that with most tokens first."""
        once = {id(given): (size, given) for size, given in self._found.values()}
        return [given for _, given in sorted(once.values(), key=lambda found: found[0], reverse=True)]


def check_reserved(passes: Sequence[TrainPass], most: PassSize | None) -> None:
    """TrainingError for a pass that is larger than all that memory is taken for; None: there is no limit."""
    if most is None:
        return
    for each in passes:
        size = PassSize.of(each.group)
        # Not by labels: where words are masked, or left out, a batch has now more of them and now fewer.
        for what, value, limit in (
            ("{} tokens", size.tokens, most.tokens),
            ("a text of {} tokens", size.longest, most.longest),
        ):
            if value > limit:
                raise TrainingError(
                    f"A pass over {counted(len(each.numbers), 'example')} has {what.format(f'{value:,}')}, but "
                    f"Trainer.reserve has taken memory for at most {limit:,}. Give it this batch, too, or use shorter "
                    "texts or a smaller batch_tokens."
                )
