"""EET's memory manager: a growing list of buffers, and caches that are known by name.

Source: Li et al., "Easy and Efficient Transformer: Scalable Inference Solution For Large NLP Model" (NAACL 2022), and
its published code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eet_lab.errors import PlanError
from eet_lab.memory.lifetimes import Chunk, Lifetime, Plan
from eet_lab.memory.pools import LedgerPool

MAX_BUFFERS = 100
CACHES = frozenset({"emb_cache", "self_mask_attn_cache", "decoder_out_cache"})
"""What EET finds by its name: the outputs of its ops."""
STRICT = frozenset({"ffn_inner", "ffn_layernorm"})
"""What EET takes only from a buffer of exactly its size; the first by accident, a name given where a flag belongs."""


class FirstFitPool(LedgerPool):
    """Whole buffers, one tensor in each; nothing is ever given back.

    As it was: the first idle buffer that is large enough is taken, however much larger; there may be 100. A tensor
    whose name is in CACHES gets the cache of that name, made once in the size that was asked first, whatever is asked
    later. The original hands out that cache even where it is too small or in use, and ends the process at the 101st
    buffer. Here both raise PlanError.

    `repaired`: the smallest idle buffer that is large enough; no limit; a cache is a buffer like any other.

    Not shown: the original counts elements and not bytes, so that buffers of one dtype are too small for another.
    """

    def __init__(self, repaired: bool = True) -> None:
        super().__init__()
        self._repaired = repaired
        self.caches: dict[str, Chunk] = {}
        """By name, in the pool as it was."""

    def place(self, lifetimes: Sequence[Lifetime]) -> Plan:
        offsets, users = [0] * len(lifetimes), dict[Chunk, Lifetime]()
        for i in sorted(range(len(lifetimes)), key=lambda i: lifetimes[i].first):
            life = lifetimes[i]
            if life.num_bytes:
                chunk = self._chunk(life, users)
                users[chunk], offsets[i] = life, chunk.start
        return Plan(tuple(lifetimes), tuple(offsets), self.chunks)

    @property
    def buffers(self) -> tuple[Chunk, ...]:
        """The chunks that are no caches, in the order in which they came."""
        return tuple(chunk for chunk in self.held if chunk not in self.caches.values())

    def _chunk(self, life: Lifetime, users: dict[Chunk, Lifetime]) -> Chunk:
        """Where `life` goes; `users` are the last ones to whom each chunk went."""
        if self._repaired:
            return min(_fitting(life, self.buffers, users), key=lambda c: c.num_bytes, default=None) or self._new(life)
        if life.name in CACHES:
            return self._cache(life, users)
        return next(iter(_fitting(life, self.buffers, users)), None) or self._buffer(life)

    def _buffer(self, life: Lifetime) -> Chunk:
        if len(self.buffers) == MAX_BUFFERS:
            raise PlanError(
                f"{life.name} asks for {life.num_bytes:,} bytes, no idle buffer is large enough, and there are "
                f"already {MAX_BUFFERS}, which is EET's limit: the original ends the process here. Use the repaired "
                "pool, which has no limit, or a planner that packs tensors into one arena."
            )
        return self._new(life)

    def _cache(self, life: Lifetime, users: dict[Chunk, Lifetime]) -> Chunk:
        cache = self.caches.get(life.name)
        if cache is None:
            cache = self.caches[life.name] = self._new(life)
        if cache.num_bytes < life.num_bytes:
            raise PlanError(
                f"{life.name} asks for {life.num_bytes:,} bytes, but the cache of that name was made with "
                f"{cache.num_bytes:,}, and EET looks at the name alone: the original writes "
                f"{life.num_bytes - cache.num_bytes:,} bytes beyond its end. Use the repaired pool, or a pool of its "
                "own for each model."
            )
        user = users.get(cache)
        if user is not None and user.overlaps(life):
            raise PlanError(
                f"{life.name} is asked for at request {life.first}, but the one of request {user.first} is in use "
                f"until request {user.last}, and EET looks at the name alone: the original overwrites it. Use the "
                "repaired pool, or another name."
            )
        return cache

    def _new(self, life: Lifetime) -> Chunk:
        return self.allocate(life.num_bytes)


def _fitting(life: Lifetime, buffers: Iterable[Chunk], users: dict[Chunk, Lifetime]) -> Iterable[Chunk]:
    """The idle buffers that `life` may have."""
    strict = life.name in STRICT
    for buffer in buffers:
        large_enough = buffer.num_bytes == life.num_bytes if strict else buffer.num_bytes >= life.num_bytes
        if large_enough and (buffer not in users or users[buffer].last < life.first):
            yield buffer
