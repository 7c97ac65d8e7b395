"""Continuous batching: requests join and leave between two steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from eet_lab.parts import Parts
from eet_lab.scheduling import Schedule
from eet_lab.technique import Technique, knob


@dataclass(frozen=True)
class ContinuousBatching(Technique):
    """Let a request take the place of one that is done, between two steps, instead of waiting for the whole batch.

    Without it, a batch begins together, and its rows are held until the last one is done: a short answer waits for a
    long one, and a prompt that comes meanwhile waits for all of them. With it, the batch is a number of slots. A
    request that waits joins as soon as a slot is free. A step has a budget of tokens: every row that generates reads
    one, and what is left reads prompts, in chunks, so that a long prompt holds up no answer for long. Each request has
    settings of its own, and gets the tokens that it would get alone, up to rounding.

    Expect nothing for prompts that begin and end together. Expect more tokens per second where there are more requests
    than slots, or answers differ in length. A request's slot has room for its full length (`memory_reuse`), or takes
    pages as it grows (`kv=paged`); where pages run out, the newest request gives its own back, and is read again later.

    Source: iteration-level scheduling from Orca (Yu et al., OSDI 2022); preemption from vLLM (Kwon et al., SOSP 2023);
    chunked prefill from Sarathi-Serve (Agrawal et al., OSDI 2024).
    """

    name: ClassVar[str] = "continuous_batching"
    title: ClassVar[str] = "Continuous batching"
    lesson: ClassVar[str] = "06_continuous_batching"
    requires: ClassVar[tuple[str, ...]] = ("pre_padding", "mask_removal", "memory_reuse", "packed_prefill")
    numerics: ClassVar[str] = "reordered"
    in_all: ClassVar[bool] = False

    rows: int = knob(
        16,
        "How many requests run at the same time; others wait. A captured decode step has 1, 8, 16, 32, ... rows, "
        "enough for the slots that are taken.",
        label="Slots",
        unit="rows",
        low=1,
        high=1024,
    )
    chunk: int = knob(
        256,
        "How many tokens of its prompt a request reads in one step.",
        label="Chunk",
        unit="tokens",
        low=1,
        high=65536,
    )
    budget: int = knob(
        512,
        "How many tokens a step has for all requests together, one for each slot at least.",
        label="Budget of a step",
        unit="tokens",
        low=1,
        high=65536,
        at_least="rows",
    )
    joins: bool = knob(
        True,
        "A request joins while others run; else a group begins when all of the one before are done.",
        choices=(True, False),
        label="Join while others run",
    )

    def apply(self, parts: Parts) -> Parts:
        return replace(parts, schedule=Schedule(self.chunk, self.budget, self.rows, self.joins))
