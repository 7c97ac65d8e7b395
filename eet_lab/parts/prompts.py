"""Where each prompt token sits, and how many columns are read at once.

B rows, S columns of the canvas, T tokens of the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from eet_lab.ops.types import Span, State, Step

Prompts = Sequence[Sequence[int]]
_tensor = torch.from_numpy

LOGGED = 16
"""Passes whose tokens stay on the device until the host has read them: twice as many as it may be behind."""


def token_by_token(prompts: Prompts, room: int) -> tuple[State, Step]:
    """The baseline: prompts start in column 0 and are read one column a step, as FasterTransformer v3.1 did.

    Row b begins to generate at step len_b; there are no pads.
    """
    return lay_out(prompts, room, num_pad=[0] * len(prompts), width=1)


def up_to_the_shortest(prompts: Prompts, room: int) -> tuple[State, Step]:
    """As FasterTransformer v4.0: in parallel up to the shortest prompt, the rest token by token; no pads."""
    return lay_out(prompts, room, num_pad=[0] * len(prompts), width=min(map(len, prompts)))


def right_aligned(prompts: Prompts, room: int) -> tuple[State, Step]:
    """Pads on the left, so that all prompts end in the same column and are read in one parallel pass."""
    longest = max(map(len, prompts))
    return lay_out(prompts, room, num_pad=[longest - len(p) for p in prompts], width=longest)


def packed(prompts: Prompts, room: int) -> tuple[State, Step]:
    """The canvas of `right_aligned`, read in a pass that holds no pad: T is the sum of the prompts' lengths."""
    state, first = right_aligned(prompts, room)
    return state, without_pads(first)


def lay_out(prompts: Prompts, room: int, num_pad: Sequence[int], width: int) -> tuple[State, Step]:
    """The canvas [B, longest + room] with every prompt after its pads, and the step that reads its first `width`
    columns.

    All tensors are on the CPU. They are made by numpy, whose few numbers no thread has to be woken for.
    """
    B, longest = len(prompts), max(map(len, prompts))
    tokens = np.zeros((longest + room, B), np.int64).T
    for row, (prompt, pad) in enumerate(zip(prompts, num_pad, strict=True)):
        tokens[row, pad : pad + len(prompt)] = prompt
    pads = np.array(num_pad, np.int64)
    ends = pads + [len(prompt) for prompt in prompts]
    rows, columns = np.divmod(np.arange(B * width), width)
    first, count = np.arange(B) * width + pads, width - pads
    step = Step(
        ids=_tensor(tokens[:, :width].reshape(-1)),
        positions=_tensor(np.maximum(columns - pads[rows], 0)),
        rows=_tensor(rows),
        columns=_tensor(columns),
        last=_tensor(first + count - 1),
        num_pad=_tensor(pads),
        first=_tensor(first),
        count=_tensor(count),
        spans=tuple(map(Span, first.tolist(), count.tolist(), pads.tolist())),
        extent=width,
    )
    state = State(
        tokens=_tensor(tokens),
        end=_tensor(ends),
        limit=_tensor(ends + (room - 1)),
        columns=_tensor(pads.copy()),
        ids=_tensor(tokens[np.arange(B), pads]),
        positions=_tensor(np.zeros_like(pads)),
        log=_tensor(np.zeros((LOGGED, B), np.int64)),
        num_passes=_tensor(np.zeros(1, np.int64)),
    )
    return state, step


def without_pads(step: Step) -> Step:
    """The same step with its real tokens alone, row after row: row b's are `first[b] .. first[b] + count[b] - 1`.

    With one more number at its end, `first` is what variable-length attention calls cu_seqlens. On the CPU.
    """
    parts = [part.numpy() for part in (step.ids, step.positions, step.rows, step.columns)]
    pads, count = step.num_pad.numpy(), step.count.numpy()
    real = parts[3] >= pads[parts[2]]
    ids, positions, rows, columns = (_tensor(part[real]) for part in parts)
    first = count.cumsum() - count
    return step._replace(
        ids=ids,
        positions=positions,
        rows=rows,
        columns=columns,
        last=_tensor(first + count - 1),
        first=_tensor(first),
        spans=tuple(span._replace(first=begin) for span, begin in zip(step.spans, first.tolist(), strict=True)),
    )


def end_to_end(rows: Prompts) -> Step:
    """The first pass of `packed`, laid out at once: no canvas is made. On the CPU."""
    count = np.array([len(row) for row in rows], np.int64)
    first, pads, T = count.cumsum() - count, count.max() - count, int(count.sum())
    owner = np.repeat(np.arange(len(count)), count)
    positions = np.arange(T) - first[owner]
    return Step(
        ids=_tensor(np.concatenate([np.asarray(row, np.int64) for row in rows])),
        positions=_tensor(positions),
        rows=_tensor(owner),
        columns=_tensor(positions + pads[owner]),
        last=_tensor(first + count - 1),
        num_pad=_tensor(pads),
        first=_tensor(first),
        count=_tensor(count),
        spans=tuple(map(Span, first.tolist(), count.tolist(), pads.tolist())),
        extent=int(count.max()),
    )


def nobody(B: int, S: int, device: torch.device) -> State:
    """The state of B slots of S columns that no request has."""
    zeros = partial(torch.zeros, dtype=torch.long, device=device)
    return State(zeros(S, B).t(), *(zeros(B) for _ in range(5)), zeros(LOGGED, B), zeros(1))  # type: ignore[call-arg]


def force(state: State, tokens: Prompts, room: int) -> None:
    """Write what shall be generated, up to `room` tokens a row, behind the prompts, as if it belonged to them."""
    for row, (end, forced) in enumerate(zip(state.end.tolist(), tokens, strict=True)):
        state.tokens[row, end : end + len(forced)] = torch.tensor(forced)
    state.end.add_(room)


def decode_step(state: State, num_pad: torch.Tensor, spans: Sequence[Span], extent: int) -> Step:
    """The step that reads one token a row. Its tensors are the state's own: they move with it."""
    each = torch.arange(len(state.ids), device=state.ids.device)
    return Step(
        ids=state.ids,
        positions=state.positions,
        rows=each,
        columns=state.columns,
        last=each,
        num_pad=num_pad,
        first=each,
        count=torch.ones_like(each),
        spans=decode_spans(spans),
        extent=extent,
    )


def decode_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans of the steps after a prefill with these."""
    return tuple(Span(row, 1, span.num_pad) for row, span in enumerate(spans))
