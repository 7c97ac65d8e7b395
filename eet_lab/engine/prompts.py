"""Where each prompt token sits, and how many columns are read at once.

B rows, S columns of the canvas, T tokens of the first step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eet_lab.ops.types import Span, State, Step

Prompts = Sequence[Sequence[int]]


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

    All tensors are on the CPU.
    """
    B, longest = len(prompts), max(map(len, prompts))
    tokens = torch.zeros(longest + room, B, dtype=torch.long).t()
    canvas = tokens.numpy()  # reads a list five times as fast as torch does
    for row, (prompt, pad) in enumerate(zip(prompts, num_pad, strict=True)):
        canvas[row, pad : pad + len(prompt)] = prompt
    pads = torch.tensor(num_pad)
    rows = torch.arange(B).repeat_interleave(width)
    columns = torch.arange(width).repeat(B)
    spans = tuple(Span(row * width + pad, width - pad, pad) for row, pad in enumerate(num_pad))
    first, count = torch.tensor([(span.first, span.count) for span in spans]).unbind(1)
    step = Step(
        ids=tokens[rows, columns],
        positions=(columns - pads[rows]).clamp(min=0),
        rows=rows,
        columns=columns,
        last=first + count - 1,
        num_pad=pads,
        first=first,
        count=count,
        spans=spans,
        extent=width,
    )
    state = State(
        tokens=tokens,
        end=pads + torch.tensor([len(p) for p in prompts]),
        column=torch.tensor([width - 1]),
        ids=tokens[:, width - 1].clone(),
        positions=width - 1 - pads,
    )
    return state, step


def without_pads(step: Step) -> Step:
    """The same step with its real tokens alone, row after row: row b's are `first[b] .. first[b] + count[b] - 1`.

    With one more number at its end, `first` is what variable-length attention calls cu_seqlens.
    """
    (real,) = torch.where(step.columns >= step.num_pad[step.rows])
    ids, positions, rows, columns = (part[real] for part in (step.ids, step.positions, step.rows, step.columns))
    first = step.count.cumsum(0) - step.count
    return step._replace(
        ids=ids,
        positions=positions,
        rows=rows,
        columns=columns,
        last=first + step.count - 1,
        first=first,
        spans=tuple(span._replace(first=begin) for span, begin in zip(step.spans, first.tolist(), strict=True)),
    )


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
        columns=state.column.expand(len(each)),
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
