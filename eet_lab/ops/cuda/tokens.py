"""What a step does beside its layers: tokens become activations, logits a token, and the state moves on.

T tokens, B rows, C channels, V vocabulary, S columns.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops import native, reference
from eet_lab.ops.cuda.launching import DTYPES, REMEDY, at, check, needs, stream_of
from eet_lab.ops.cuda.linear import Draw, largest_outputs, norm_linear, num_blocks, outputs_and_largest, takes_few
from eet_lab.ops.cuda.norm import check_residual_norm, residual_norm
from eet_lab.ops.fits import refuses
from eet_lab.ops.types import Batch, Choice, Empty, Linear, Norm, Sampling, TokenBuffer

MOST_BLOCKS = 512  # of a head, from whose largest logits choose_top_k begins


@needs("tokens")
def embed(
    ids: Tensor,
    positions: Tensor,
    token_embedding: Tensor,
    position_embedding: Tensor | None,
    *,
    empty: Empty,
    dependent: bool = False,
) -> Tensor:
    """Token plus position embedding, if there is one: ids and positions [T], tables [V,C] and [S,C] -> [T,C].

    One launch.
    """
    T, C = len(ids), token_embedding.shape[1]
    if token_embedding.dtype not in DTYPES or C % 8:
        takes = f"kernels take {', '.join(map(str, DTYPES))}, a multiple of 8"
        raise KernelError(f"the token embedding is {token_embedding.dtype} with {C} channels; {takes}. {REMEDY}")
    check(token_embedding, "token_embedding", token_embedding.dtype, (len(token_embedding), C))
    if position_embedding is not None:
        check(position_embedding, "position_embedding", token_embedding.dtype, (len(position_embedding), C))
    check(ids, "ids", torch.int64, (T,))
    check(positions, "positions", torch.int64, (T,))
    out = empty("embedded", (T, C), token_embedding)
    if out.is_meta or not T:
        return out
    native.loaded("tokens").eet_embed(
        out=at(out), ids=ids.data_ptr(), positions=positions.data_ptr(), token_embedding=at(token_embedding),
        position_embedding=at(position_embedding), dtype=DTYPES[out.dtype], T=T, C=C, dependent=dependent,
        stream=stream_of(out),
    )  # fmt: skip
    return out


@needs("tokens", "residual_norm")
def embed_norm(
    ids: Tensor,
    positions: Tensor,
    types: Tensor | None,
    token_embedding: Tensor,
    position_embedding: Tensor,
    type_embedding: Tensor | None,
    norm_w: Norm,
    *,
    empty: Empty,
) -> Tensor:
    """norm(token + position + type embedding): ids, positions and types [T], type_embedding [types,C] -> [T,C].

    Two launches, and one more where types are told: else all tokens are of type 0, which the norm takes for a bias.
    """
    x, kinds, bias = embed(ids, positions, token_embedding, position_embedding, empty=empty), None, None
    check_residual_norm(x, norm_w)
    if type_embedding is not None and types is not None:
        kinds = torch.index_select(type_embedding, 0, types, out=empty("kind", x.shape, x))
    elif type_embedding is not None:
        bias = type_embedding[0]
    return x if x.is_meta or not len(x) else residual_norm(x, norm_w, kinds, bias)


@refuses(lambda model: None if model.spec.causal else "tokens are drawn by decoders, and this model is an encoder")
@needs(*norm_linear.kernels, "sampling", "top_k")  # type: ignore[attr-defined]
def next_token(
    x: Tensor, batch: Batch, norm_w: Norm, head: Linear, sampling: Sampling, *, empty: Empty, dependent: bool = False
) -> Tensor:
    """The next token of every row, [B]: our norm and head, and a choice.

    Few rows are two launches: every block of the head leaves the largest of its logits, and the second launch chooses
    among those. So it does for a draw from all tokens, whose noise a head that is not int8 adds. For top-k and top-p
    the head writes the logits too, and the second launch keeps those that reach the k-th largest of these. Else, which
    is for more rows, logits are written and one launch chooses; rows of more than one token take two more before, which
    pick the newest. For so many rows, `sampling.choice` says which launches these are, and the logits are the same in
    all of them.
    """
    B, V = len(batch.last), len(head.weight)
    positions, few = batch.positions, takes_few(B, x, head, gathered=True)
    if few and sampling.choice == Choice.LIMITED and num_blocks(V) <= MOST_BLOCKS:
        logits, best = outputs_and_largest(x, batch.last, norm_w, head, empty=empty, dependent=dependent)
        return choose_top_k(logits, best, batch.last, positions, sampling, empty=empty, dependent=dependent)
    if few and (sampling.greedy or (sampling.choice == Choice.DRAW and head.scale is None)):
        draw = None if sampling.greedy else Draw(positions, sampling.noise, sampling.temperature)
        best = largest_outputs(x, batch.last, norm_w, head, draw, empty=empty, dependent=dependent)
        return choose_best(best, empty=empty, dependent=dependent)
    if not batch.one_each:  # else a row's only token is its newest
        x = torch.index_select(x, 0, batch.last, out=empty("newest", (B, x.shape[1]), x))
        positions = torch.index_select(positions, 0, batch.last, out=empty("newest_positions", (B,), positions))
    logits = norm_linear(x, norm_w, head, empty=empty, dependent=dependent)
    return choose(logits, positions, sampling, empty=empty, dependent=dependent)


@needs(*norm_linear.kernels)  # type: ignore[attr-defined]
def next_token_by_torch(
    x: Tensor, batch: Batch, norm_w: Norm, head: Linear, sampling: Sampling, *, empty: Empty, dependent: bool = False
) -> Tensor:
    """The next token of every row, [B]: the reference's choice among the logits of our norm and head."""
    logits = partial(norm_linear, dependent=dependent)
    return reference.next_token(x, batch, norm_w, head, sampling, empty=empty, norm_linear=logits)


@needs("sampling")
def choose(logits: Tensor, positions: Tensor, sampling: Sampling, *, empty: Empty, dependent: bool = False) -> Tensor:
    """Arg-max, or the reference's draw, in one launch whatever V is: logits [B,V], positions [B] -> [B].

    It agrees with the reference up to rounding: a token may enter or leave the top-p where the mass before it is within
    rounding of `top_p`. Tokens that tie go to the lowest.
    """
    B, V = logits.shape
    _check_logits(logits)
    check(positions, "positions", torch.int64, (B,))
    asked = _asked(sampling, B)
    token = empty("token", (B,), positions)
    if token.is_meta or not B:
        return token
    native.loaded("sampling").eet_choose(
        token=token.data_ptr(), logits=at(logits), positions=positions.data_ptr(), **asked, dtype=DTYPES[logits.dtype],
        B=B, V=V, dependent=dependent, stream=stream_of(logits),
    )  # fmt: skip
    return token


@needs("top_k")
def choose_top_k(
    logits: Tensor,
    best: Tensor,
    rows: Tensor,
    positions: Tensor,
    sampling: Sampling,
    *,
    empty: Empty,
    dependent: bool = False,
) -> Tensor:
    """The draw of `choose`, in one launch, and with a top-k mostly one look at the logits: [B,V] -> [B].

    `best` [B,blocks] is what `outputs_and_largest` gives beside them, and row i has position positions[rows[i]]. There
    are at most 512 blocks. A row with a top-k of more than there are, or without, takes as many looks as in `choose`.
    """
    (B, V), blocks = logits.shape, best.shape[1]
    _check_logits(logits)
    check(best, "best", torch.int64, (B, blocks))
    check(rows, "rows", torch.int64, (B,))
    check(positions, "positions", torch.int64, (len(positions),))
    asked = _asked(sampling._replace(choice=Choice.LIMITED), B)
    token = empty("token", (B,), rows)
    if token.is_meta or not B:
        return token
    native.loaded("top_k").eet_choose_top_k(
        token=token.data_ptr(), logits=at(logits), best=best.data_ptr(), positions=positions.data_ptr(),
        rows=rows.data_ptr(), **asked, dtype=DTYPES[logits.dtype], B=B, V=V, num_blocks=blocks, dependent=dependent,
        stream=stream_of(logits),
    )  # fmt: skip
    return token


def _check_logits(logits: Tensor) -> None:
    if logits.dtype not in DTYPES:
        raise KernelError(f"logits are {logits.dtype}; kernels take {', '.join(map(str, DTYPES))}. {REMEDY}")
    check(logits, "logits", logits.dtype, tuple(logits.shape))


def _asked(sampling: Sampling, B: int) -> dict[str, int | None]:
    """For launchers, what B rows ask for, as far as a kernel has to look at it."""
    dtypes = {"noise": torch.int64, "temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32}
    for name, dtype in dtypes.items():
        check(getattr(sampling, name), name, dtype, (B,))
    num_read = {Choice.GREEDY: 0, Choice.DRAW: 2, Choice.LIMITED: 4}[sampling.choice]
    return {name: getattr(sampling, name).data_ptr() if i < num_read else None for i, name in enumerate(dtypes)}


@needs("sampling")
def choose_best(best: Tensor, *, empty: Empty, dependent: bool = False) -> Tensor:
    """The outputs that `largest_outputs` found, in one launch: [B,blocks] -> [B]."""
    B, num_blocks = best.shape
    token = empty("token", (B,), best)
    if token.is_meta or not B:
        return token
    native.loaded("sampling").eet_choose_best(
        token=token.data_ptr(), best=best.data_ptr(), B=B, num_blocks=num_blocks, dependent=dependent,
        stream=stream_of(best),
    )  # fmt: skip
    return token


@needs("tokens")
def advance(buffer: TokenBuffer, token: Tensor, count: Tensor, *, empty: Empty, dependent: bool = False) -> None:
    """Move each row on by the `count` [B] tokens that a pass read, and write `token` [B] where they end.

    One launch.
    """
    B = len(buffer.ids)
    check(token, "token", torch.int64, (B,))
    check(count, "count", torch.int64, (B,))
    if token.is_meta or not B:
        return
    tensors = {name: part.data_ptr() for name, part in zip(buffer._fields, buffer, strict=True)}
    row_stride, column_stride = buffer.tokens.stride()
    native.loaded("tokens").eet_advance(
        **tensors, token=token.data_ptr(), count=count.data_ptr(), row_stride=row_stride, column_stride=column_stride,
        log_stride=buffer.log.stride(0), B=B, R=len(buffer.log), dependent=dependent, stream=stream_of(token),
    )  # fmt: skip
