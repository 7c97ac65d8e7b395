"""The ledger of a KV cache: which columns of it are whose. The tensors are a store's, which mirrors the ledger."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from eet_lab.errors import ScheduleError
from eet_lab.scheduling.request import Request
from eet_lab.scheduling.whole import MOST, check_whole

HIDDEN = 0
"""The page that belongs to no request: idle rows and pads write to it, and no query sees it."""


class Ledger(Protocol):
    """What a scheduler asks of a KV cache."""

    columns: Sequence[int]
    """How many columns of each slot exist."""
    num_slots: int
    """Requests that can be in the cache at the same time."""
    most_columns: int
    """The longest sequence that fits if it is alone."""

    def skip(self, slot: int, pads: int) -> None:
        """The first `pads` columns of a slot that has nothing yet hold no token."""

    def reach(self, slot: int, columns: int, spare: int = 0) -> bool:
        """Make columns [0, columns) of a slot exist; False, with nothing changed, where pages are lacking.

        A page is taken only if `spare` more are free.
        """

    def join(self, slot: int, request: Request, patient: bool, spare: int = 0) -> int | None:
        """Make columns for all tokens of a request exist in a slot that has nothing yet, as `reach` does.

        Returns how many of its tokens need not be read, since their keys and values are there already. None, with
        nothing changed, where pages are lacking; and if it is `patient`, where another is about to read what it needs.
        Where slots share nothing, all tokens have to be read.
        """
        return 0 if self.reach(slot, request.pad + request.length, spare) else None

    def release(self, slot: int) -> None:
        """Give back all that the slot has."""


class PageLedger(Ledger):
    """Pages of `page` columns, which a slot takes one by one, wherever one is free. The first page is never given out.

    `table[slot]` are the slot's pages, in order of their columns: a row of the block table, from block `skipped[slot]`
    on, since a page that would hold nothing but pads is not taken. A page that was given back
    may be given out at once: passes run in the order of their launches, so the new owner writes after the old one read.
    """

    columns: list[int]

    def __init__(self, num_pages: int, page: int, num_slots: int) -> None:
        check_whole(ScheduleError, "num_pages", num_pages, 2, MOST, " (one of them is never given out)")
        check_whole(ScheduleError, "page", page, 1, MOST)
        check_whole(ScheduleError, "num_slots", num_slots, 1, MOST)
        self.num_pages, self.page, self.num_slots = num_pages, page, num_slots
        self.most_columns = (num_pages - 1) * page
        self.table: list[list[int]] = [[] for _ in range(num_slots)]
        self.skipped = [0] * num_slots
        self.columns = [0] * num_slots
        self.changed: set[int] = set()  # slots whose pages are others than at the last `take_changes`
        self._free = list(range(num_pages - 1, HIDDEN, -1))  # the last one is given out first

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def skip(self, slot: int, pads: int) -> None:
        self.skipped[slot] = pads // self.page

    def reach(self, slot: int, columns: int, spare: int = 0) -> bool:
        pages, skipped = self.table[slot], self.skipped[slot]
        missing = -(-columns // self.page) - skipped - len(pages)
        if missing <= 0:
            return True
        if missing + spare > self.free:
            return False
        pages += self._take(missing)
        self.columns[slot] = (skipped + len(pages)) * self.page
        self.changed.add(slot)
        return True

    def release(self, slot: int) -> None:
        if pages := self.table[slot]:
            self._put_back(pages)
            self.table[slot], self.columns[slot], self.skipped[slot] = [], 0, 0
            self.changed.add(slot)

    def _take(self, num_pages: int) -> list[int]:
        return [self._free.pop() for _ in range(num_pages)]

    def _put_back(self, pages: Sequence[int]) -> None:
        self._free += reversed(pages)

    def take_changes(self) -> Collection[int]:
        """The slots whose rows of the block table a store has to write again; from now on, later changes count."""
        changed, self.changed = self.changed, set()
        return changed


class Held(Ledger):
    """Another ledger, whose slots keep what they have: those of a batch that begins together and is replaced whole."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.num_slots, self.most_columns, self.columns = ledger.num_slots, ledger.most_columns, ledger.columns

    def skip(self, slot: int, pads: int) -> None:
        self._ledger.skip(slot, pads)

    def reach(self, slot: int, columns: int, spare: int = 0) -> bool:
        return self._ledger.reach(slot, columns, spare)

    def release(self, slot: int) -> None:
        """Nothing: the next batch opens the cache anew."""


class Slab(Ledger):
    """A static cache: one long page for each slot, which is always there."""

    def __init__(self, num_slots: int, columns: int) -> None:
        check_whole(ScheduleError, "num_slots", num_slots, 1, MOST)
        check_whole(ScheduleError, "columns", columns, 1, MOST)
        self.num_slots, self.most_columns = num_slots, columns
        self.columns = (columns,) * num_slots

    def skip(self, slot: int, pads: int) -> None:
        """Nothing: its columns are there in any case."""

    def reach(self, slot: int, columns: int, spare: int = 0) -> bool:
        return columns <= self.most_columns

    def release(self, slot: int) -> None:
        """Nothing: the slot's next request writes over it."""
