"""What a step does beside its layers: tokens become activations, logits a token, and the state moves on.

T tokens, B rows, C channels, V words, S columns.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops import native, reference
from eet_lab.ops.cuda.launching import DTYPES, REMEDY, at, check, needs, stream_of
from eet_lab.ops.cuda.linear import largest_outputs, norm_linear, takes_few
from eet_lab.ops.pads import serves_any_pads
from eet_lab.ops.types import Empty, Linear, Norm, Sampling, State, Step


@needs("tokens")
@serves_any_pads
def embed(
    ids: Tensor, positions: Tensor, words: Tensor, places: Tensor, *, empty: Empty, dependent: bool = False
) -> Tensor:
    """Word plus position embedding, one launch: ids [T], positions [T], words [V,C], places [S,C] -> [T,C]."""
    T, C = len(ids), words.shape[1]
    if words.dtype not in DTYPES or C % 8:
        takes = f"kernels take {', '.join(map(str, DTYPES))}, a multiple of 8"
        raise KernelError(f"words are {words.dtype} with {C} channels; {takes}. {REMEDY}")
    check(words, "words", words.dtype, (len(words), C))
    check(places, "places", words.dtype, (len(places), C))
    check(ids, "ids", torch.int64, (T,))
    check(positions, "positions", torch.int64, (T,))
    out = empty("embedded", (T, C), words)
    if out.is_meta or not T:
        return out
    tensors = (at(out), ids.data_ptr(), positions.data_ptr(), at(words), at(places))
    native.loaded("tokens").eet_embed(*tensors, DTYPES[words.dtype], T, C, dependent, stream_of(words))
    return out


@needs(*norm_linear.kernels, "sampling")  # type: ignore[attr-defined]
@serves_any_pads
def next_token(
    x: Tensor, step: Step, norm_w: Norm, head: Linear, sampling: Sampling, *, empty: Empty, dependent: bool = False
) -> Tensor:
    """The next token of every row, [B]: our norm and head, and a choice.

    An arg-max of few rows writes no logits: the head keeps the largest in every block, and a second launch chooses
    among those. Else they are written, and one launch chooses; rows of more than one token take two more before, which
    pick the newest.
    """
    B = len(step.last)
    if sampling.greedy and takes_few(B, x, head, gathered=True):
        best = largest_outputs(x, step.last, norm_w, head, empty=empty, dependent=dependent)
        return choose_best(best, empty=empty, dependent=dependent)
    positions = step.positions
    if len(x) != B:  # else every row has one token, and that is its newest
        x = torch.index_select(x, 0, step.last, out=empty("newest", (B, x.shape[1]), x))
        positions = torch.index_select(positions, 0, step.last, out=empty("newest_positions", (B,), positions))
    logits = norm_linear(x, norm_w, head, empty=empty, dependent=dependent)
    return choose(logits, positions, sampling, empty=empty, dependent=dependent)


@needs(*norm_linear.kernels)  # type: ignore[attr-defined]
@serves_any_pads
def next_token_by_torch(
    x: Tensor, step: Step, norm_w: Norm, head: Linear, sampling: Sampling, *, empty: Empty, dependent: bool = False
) -> Tensor:
    """The next token of every row, [B]: the reference's choice among the logits of our norm and head."""
    logits = partial(norm_linear, dependent=dependent)
    return reference.next_token(x, step, norm_w, head, sampling, empty=empty, norm_linear=logits)


@needs("sampling")
def choose(logits: Tensor, positions: Tensor, sampling: Sampling, *, empty: Empty, dependent: bool = False) -> Tensor:
    """Arg-max, or the reference's draw, in one launch whatever V is: logits [B,V], positions [B] -> [B].

    It agrees with the reference up to rounding: a word may enter or leave the top-p where the mass before it is within
    rounding of `top_p`. Words that tie go to the lowest.
    """
    B, V = logits.shape
    if logits.dtype not in DTYPES:
        raise KernelError(f"logits are {logits.dtype}; kernels take {', '.join(map(str, DTYPES))}. {REMEDY}")
    check(logits, "logits", logits.dtype, (B, V))
    check(positions, "positions", torch.int64, (B,))
    token = empty("token", (B,), positions)
    if token.is_meta or not B:
        return token
    tensors = (token.data_ptr(), at(logits), positions.data_ptr(), sampling.seed.data_ptr())
    how = (min(sampling.top_k, V), sampling.temperature, sampling.top_p)
    native.loaded("sampling").eet_choose(*tensors, DTYPES[logits.dtype], B, V, *how, dependent, stream_of(logits))
    return token


@needs("sampling")
def choose_best(best: Tensor, *, empty: Empty, dependent: bool = False) -> Tensor:
    """The outputs that `largest_outputs` found, in one launch: [B,blocks] -> [B]."""
    B, num_blocks = best.shape
    token = empty("token", (B,), best)
    if token.is_meta or not B:
        return token
    stream = stream_of(best)
    native.loaded("sampling").eet_choose_best(token.data_ptr(), best.data_ptr(), B, num_blocks, dependent, stream)
    return token


@needs("tokens")
@serves_any_pads
def advance(state: State, token: Tensor, *, empty: Empty, dependent: bool = False) -> None:
    """Write `token` [B] into the next column of the canvas, except where the prompt still stands; step forward.

    One launch.
    """
    B = len(state.ids)
    check(token, "token", torch.int64, (B,))
    if token.is_meta or not B:
        return
    tensors = (part.data_ptr() for part in (*state, token))
    native.loaded("tokens").eet_advance(*tensors, *state.tokens.stride(), B, dependent, stream_of(token))
