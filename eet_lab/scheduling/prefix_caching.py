"""Prefix caching: requests that begin with the same tokens share the pages of the KV cache that hold these.

Source: automatic prefix caching of vLLM (Kwon et al., SOSP 2023), a hash of the parent and the tokens for each full
page; shared prefixes as a tree, and requests that wait for one another's, from SGLang (Zheng et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from operator import attrgetter

from eet_lab.scheduling.pages import PageLedger
from eet_lab.scheduling.request import Request

ROOT = 0
"""The parent of a first page."""

Key = tuple[int, tuple[int, ...]]
"""The number of the page before, and a page's tokens: all that its keys and values depend on."""


@dataclass(eq=False)
class CachedPage:
    """A full page that others may share once its tokens are read, and from then on nobody writes to."""

    key: Key
    number: int  # its own as a parent, never given again: what follows a page that was evicted is found no more
    page: int
    end: int  # tokens up to its end, from the first one of the sequence
    reader: Request | None  # who reads them; None: they were read by one that has left

    @property
    def is_read(self) -> bool:
        """Whether the pass that writes it is launched; later passes then read what it wrote."""
        return self.reader is None or self.reader.read >= self.end


class SharedPageLedger(PageLedger):
    """Pages that are found by what they hold: a full one serves all requests whose tokens up to its end are the same.

    They are looked up by the page before and their own tokens, which a dict hashes and then compares, so two pages with
    the same hash are never taken for each other. A page is free once nobody has it, but keeps what it holds:
    it is evicted, the least recently used first, when pages without content have run out. The pages of a request
    that leaves are evicted from the last to the first, so that what follows a page goes before it.

    At least one token has to be read, for what comes after it. Where all of them are there, the last page is copied,
    since that token's keys are written again (copy on write); a store applies `take_copies`.
    """

    def __init__(self, num_pages: int, page: int, num_slots: int) -> None:
        super().__init__(num_pages, page, num_slots)
        self.num_queries = self.num_hits = 0
        """Tokens of requests that got a slot, and how many of them were there already; counted again for one that
        gave way, and comes back."""
        self.num_shared = 0
        """Pages that would be needed beside these, if no two requests shared one."""
        self._by_key: dict[Key, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._idle: dict[int, None] = {}  # cached pages that nobody has, the least recently used one first
        self._users = [0] * num_pages
        self._requests: list[Request | None] = [None] * num_slots
        self._numbers = count(ROOT + 1)
        self._copies: list[tuple[int, int]] = []

    @property
    def free(self) -> int:
        """The number of pages that nobody has, those among them that keep what they hold."""
        return len(self._free) + len(self._idle)

    def join(self, slot: int, request: Request, patient: bool, spare: int = 0) -> int | None:
        tokens = request.known_tokens(0, request.length)
        found = list(self._found(tokens))
        read = list(takewhile(attrgetter("is_read"), found))
        if patient and len(read) < len(found):
            return None
        cached = min(len(read) * self.page, len(tokens) - 1)
        shared, copied = read[: cached // self.page], read[cached // self.page :]
        missing = -(-len(tokens) // self.page) - len(shared)
        if missing + spare > self.free - sum(each.page in self._idle for each in shared):
            return None
        self.table[slot], self._requests[slot] = [self._use(each.page) for each in shared], request
        for each in copied:  # evicted last, and then it is the page that it would be copied to
            self._use_last(each.page)
        self.reach(slot, len(tokens))
        self._copies += [(each.page, self.table[slot][-1]) for each in copied]
        self._enter(slot, tokens)
        self.num_queries += len(tokens)
        self.num_hits += cached
        return cached

    def release(self, slot: int) -> None:
        if request := self._requests[slot]:  # its answer may be cached too, as far as the host knows it
            self._enter(slot, request.known_tokens(0, request.known))
        super().release(slot)
        self._requests[slot] = None

    def reset(self) -> None:
        """Forget the pages that nobody has, and what was counted."""
        self._free += [self._forget(self._by_page[page]) for page in self._idle]
        self._idle = {}
        self.num_queries = self.num_hits = 0

    def take_copies(self) -> Sequence[tuple[int, int]]:
        """The pages whose content a store has to copy before the next pass, from where and to where, in order."""
        copies, self._copies = self._copies, []
        return copies

    def _found(self, tokens: Sequence[int]) -> Iterator[CachedPage]:
        """The cached pages with which these tokens begin."""
        number = ROOT
        for begin in range(0, len(tokens) - self.page + 1, self.page):
            cached = self._by_key.get((number, tuple(tokens[begin : begin + self.page])))
            if cached is None:
                return
            yield cached
            number = cached.number

    def _enter(self, slot: int, tokens: Sequence[int]) -> None:
        """Let others find the full pages of a slot, which holds these tokens or is about to read them."""
        number, request = ROOT, self._requests[slot]
        for page, end in zip(self.table[slot], range(self.page, len(tokens) + 1, self.page), strict=False):
            key = number, tuple(tokens[end - self.page : end])
            cached = self._by_key.get(key)
            if cached is None:
                if page in self._by_page:  # under a page before it that was evicted since: nobody finds it there
                    self._forget(self._by_page[page])
                cached = CachedPage(key, next(self._numbers), page, end, request)
                self._by_key[key] = self._by_page[page] = cached
            number = cached.number

    def _use(self, page: int) -> int:
        self._idle.pop(page, None)
        self.num_shared += self._users[page] > 0
        self._users[page] += 1
        return page

    def _use_last(self, page: int) -> None:
        """Let a page be evicted after all others, if nobody has it."""
        if page in self._idle:
            self._idle[page] = self._idle.pop(page)

    def _take(self, num_pages: int) -> list[int]:
        return [self._use(self._free.pop() if self._free else self._evict()) for _ in range(num_pages)]

    def _put_back(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._users[page] -= 1
            if cached := self._by_page.get(page):
                if cached.is_read:
                    cached.reader = None
                else:  # only its reader has it, and leaves
                    self._forget(cached)
            if self._users[page]:
                self.num_shared -= 1
            elif page in self._by_page:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _evict(self) -> int:
        page = next(iter(self._idle))
        del self._idle[page]
        return self._forget(self._by_page[page])

    def _forget(self, cached: CachedPage) -> int:
        del self._by_key[cached.key], self._by_page[cached.page]
        return cached.page
