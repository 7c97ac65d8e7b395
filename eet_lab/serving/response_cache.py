"""Answers that need no model: those of requests that were answered before.

The idea is TurboTransformers' (Fang et al., PPoPP 2021), whose pipeline looks for a request's answer before it queues
it; its own was never released. A request is the same if its endpoint and all fields that matter are. Only what the
same request gets again is kept: what is greedy or drawn with a seed, embeddings, and classes. Errors are not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
from collections import OrderedDict
from typing import Any

from eet_lab.serving.bodies import Body

ENTRY_BYTES = 256
"""What an entry takes beside its answer: its key, and its places in the table."""
HIT = {"x-cache": "hit"}
"""The header of an answer that was kept."""


class ResponseCache:
    """The answers that were asked for last, in at most `max_bytes`; 0: none. All calls come from the server's loop.

    An answer is made once: whoever asks for it meanwhile waits for the one who makes it, and if that one fails or
    leaves, the next one makes it. Answers are kept as bytes, so that they are counted exactly and give the garbage
    collector nothing to walk.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept = OrderedDict[bytes, bytes]()  # the one that was asked for last is last
        self._making = dict[bytes, asyncio.Future[Any]]()
        self.num_bytes = self.hits = self.misses = 0

    def key_of(self, path: str, body: Body) -> bytes | None:
        """What equal requests share; None for one whose answer is not kept."""
        if not self._max_bytes or (identity := body.identity()) is None:
            return None
        return hashlib.sha256(json.dumps([path, identity], sort_keys=True).encode()).digest()

    def get(self, key: bytes | None) -> Any | None:
        """The answer that was kept for it; without a key it is no request of ours."""
        if key is None:
            return None
        if (found := self._kept.get(key)) is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return pickle.loads(found)

    def put(self, key: bytes | None, answer: Any) -> None:
        """Keep it, unless it has no key or is too large, and let go of what was asked for longest ago."""
        if key is None:
            return
        self._made(key, answer)
        kept = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        if len(kept) + ENTRY_BYTES > self._max_bytes:
            return
        self._drop(key)
        self._kept[key] = kept
        self.num_bytes += len(kept) + ENTRY_BYTES
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def making(self, key: bytes | None) -> asyncio.Future[Any] | None:
        """Gives the answer that somebody makes now; None if that comes to nothing."""
        return None if key is None else self._making.get(key)

    def begin(self, key: bytes | None) -> None:
        """The caller makes this answer from now on: it will `put` it, or say that it is `done`."""
        if key is not None:
            self._making[key] = asyncio.get_running_loop().create_future()

    def done(self, key: bytes | None) -> None:
        """Whoever made this answer does so no more."""
        if key is not None:
            self._made(key, None)

    def _made(self, key: bytes, answer: Any) -> None:
        if (making := self._making.pop(key, None)) is not None:
            making.set_result(answer)

    def _drop(self, key: bytes) -> None:
        if (found := self._kept.pop(key, None)) is not None:
            self.num_bytes -= len(found) + ENTRY_BYTES
