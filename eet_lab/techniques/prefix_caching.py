"""Prefix caching: requests that begin with the same tokens share the pages of the KV cache that hold these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.parts import Parts
from eet_lab.parts.paged_kv import PagedKV
from eet_lab.technique import Technique


@dataclass(frozen=True)
class PrefixCaching(Technique):
    """Read the tokens that prompts begin with once, and let all requests that have them share these pages.

    Without it, each request reads its whole prompt, however many had the same instructions or the same chat in front
    of theirs. With it, the KV cache is laid out in pages, as by `memory_reuse:kv=paged`, whose page size and number of
    pages stay. A full page is found again by its tokens and all before them. A request that comes takes the pages that
    are there, and begins to read behind them; it waits while one that runs is about to read what both begin with.
    Pages that nobody has any more keep what they hold, prompts and answers, until their room is needed: the
    least recently used goes first. Where a whole prompt is there, its last page is copied, and its last token read
    again for what comes next. A request that gave way for want of pages finds those of its own that are left.

    Expect the time to first token, and the work of prompts, to fall by the share of prompt tokens that are found, which
    `Engine.prefix_cache_hit_rate` tells; and more requests in as many pages. Tokens after the prompt take as long as
    before, and prompts that differ from the first token on gain nothing. `Engine.generate` begins with nothing cached;
    requests that `Engine.add` and a server take find what was left by those before them.

    Source: automatic prefix caching of vLLM (Kwon et al., SOSP 2023); RadixAttention of SGLang (Zheng et al., 2024).
    """

    name: ClassVar[str] = "prefix_caching"
    title: ClassVar[str] = "Prefix caching"
    lesson: ClassVar[str] = "06_continuous_batching"
    requires: ClassVar[tuple[str, ...]] = (
        "pre_padding",
        "mask_removal",
        "memory_reuse",
        "packed_prefill",
        "continuous_batching",
    )
    numerics: ClassVar[str] = "reordered"
    in_all: ClassVar[bool] = False

    def apply(self, parts: Parts) -> Parts:
        paged = parts.kv_cache if isinstance(parts.kv_cache, PagedKV) else PagedKV()
        return replace(parts, kv_cache=replace(paged, prefix_caching=True))
