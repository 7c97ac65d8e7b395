"""An encoder's captured passes: a graph for each size, and room for all of them in one arena."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from eet_lab.engine.tasks import TextTask
from eet_lab.ops.fits import FEW
from eet_lab.parts.buckets import Size, blank, by_device, filled
from eet_lab.parts.passes import Group, Pass
from eet_lab.parts.staging import sent
from eet_lab.parts.steps import Replays
from eet_lab.parts.trace import TracedPass

if TYPE_CHECKING:
    from eet_lab.engine.encode import EncoderEngine
    from eet_lab.parts.protocols import CapturesPasses


def pass_name(tokens: int, asked: int) -> str:
    """The same for passes in which ops ask for the same things."""
    few = min(tokens, FEW + 1), min(asked, FEW + 1)
    return "encode" if min(few) > FEW else "encode {} tokens, {} asked for".format(*few)


class Room(NamedTuple):
    """The largest passes of a name, all of whose smaller ones need no more memory."""

    size: Size
    task: TextTask
    is_typed: bool


class Asked(NamedTuple):
    """A pass, and what is made of it."""

    read: Pass
    task: TextTask


class CapturedPasses:
    """The launches of an engine's passes, each in a graph from its second time on.

    Where attention reads rows on the device, a pass is filled up to its bucket, whose graph serves all texts that fall
    into it; else a graph serves texts of the very same lengths, in the same layout. Passes of more tokens than the
    launch part says run as they are. A graph holds a pass and its task, so that nothing but its result is read after
    it, which is copied before the next one is launched.
    """

    def __init__(self, engine: EncoderEngine, launch: CapturesPasses) -> None:
        parts = engine.parts
        self._engine, self._most = engine, launch.tokens
        self.by_bucket = parts.has_rows_on_device
        self._replays = Replays(
            lambda given: engine.run(self._name(*given), *given),
            engine.model.device,
            launch.graphs,
            shown=lambda given: given,
            frees_first=False,
        )
        self._rooms: dict[str, Room] = {}

    @property
    def captures(self) -> int:
        """Passes captured so far, those whose graphs are gone, too."""
        return self._replays.captures

    @property
    def held_bytes(self) -> int:
        """What graphs hold, and what they read."""
        return self._replays.held_bytes

    def bucket(self, group: Group, task: TextTask) -> Hashable:
        """The same for passes of other lengths that one graph serves; None: no graph does."""
        if group.computed_tokens > self._most:
            return None
        exact = tuple((text.length, len(text.asked)) for text in group.texts)
        return Size.of(group).bucket(task.tokens) if self.by_bucket else exact, group.packed, group.is_typed

    def plan(self, groups: Sequence[Group], task: TextTask) -> None:
        """Memory for all passes."""
        if self.by_bucket:
            self._make_room(groups, task)
        else:
            self._engine.plan(groups, task, repeated=True)

    def launched(self, group: Group, read: Pass, task: TextTask) -> Tensor:
        """What the task makes of a pass that is laid out, or will have made: the next launch may overwrite it."""
        engine = self._engine
        if group.computed_tokens > self._most:
            return engine.run(self._name(read, task), sent(read, engine.staging), task)
        given = read
        if self.by_bucket:
            given = by_device(filled(read, Size.of(group).bucket(task.tokens)), group.packed)
        made = self._replays(Asked(given, task))
        return made[: len(read.sizes) if task.one_each else len(read.asked)]

    def void(self) -> None:
        """Let go of graphs: memory that they refer to has moved."""
        self._replays.void()

    def close(self) -> None:
        """Give graphs back, and their memory."""
        self._replays.close()
        self._rooms = {}

    def _make_room(self, groups: Sequence[Group], task: TextTask) -> None:
        """Room grows, so that a pass that has been there, and any smaller one, is neither traced nor placed again."""
        rooms = dict(self._rooms)
        for group in groups:
            size, exact = Size.of(group).bucket(task.tokens), Size.of(group)
            if exact.tokens > self._most:  # it runs as it is, and ops tell few tokens apart
                few = {"tokens": exact.tokens, "asked": exact.asked}
                size = size._replace(**{each: number for each, number in few.items() if number <= FEW})
            name = self._named(size.tokens, size.asked, group.is_typed, task)
            before = rooms.get(name)
            rooms[name] = Room(size if before is None else size.joined(before.size), task, group.is_typed)
        if rooms == self._rooms:
            return
        self._rooms = {}
        self._engine.place({name: self._traced(name, room) for name, room in rooms.items()}, reserved=True)
        self._rooms = rooms

    def _traced(self, name: str, room: Room) -> TracedPass:
        laid_out: Callable[[], Pass] = partial(blank, room.size, room.is_typed)
        return self._engine.traced((name, *room.size), laid_out, room.task)._replace(repeated=True)

    def _name(self, read: Pass, task: TextTask) -> str:
        """What memory was planned for such a pass."""
        return self._named(len(read.batch.ids), len(read.asked), read.types is not None, task)

    def _named(self, tokens: int, asked: int, is_typed: bool, task: TextTask) -> str:
        name = pass_name(tokens, asked)
        return f"{name}, {task.name}{', with types' if is_typed else ''}" if self.by_bucket else name
