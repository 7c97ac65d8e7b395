"""Embeddings that are trained. T tokens, C channels, V rows of a table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eet_lab.ops import native
from eet_lab.ops.cuda.launching import DTYPES, at, check, drop_arguments, needs, stream_of, unfit_width, untrainable
from eet_lab.ops.cuda.plan import ceil
from eet_lab.ops.fits import refuses
from eet_lab.ops.noise import Dropout, Noise, all_kept
from eet_lab.ops.types import Empty

PART = 32  # tokens whose gradients a warp adds up


@refuses(unfit_width, untrainable)
@needs("train_embedding")
def embedded(
    ids: Tensor,
    positions: Tensor,
    types: Tensor | None,
    token_embedding: Tensor,
    position_embedding: Tensor | None,
    type_embedding: Tensor | None,
    *,
    scale: float = 1.0,
    padding: int | None = None,
    empty: Empty,
    drop: Dropout = all_kept,
) -> Tensor:
    """The sum of a token's embeddings: see `reference.embedded`. One launch; backward a sort and two for each table."""
    indices = ids, positions, types
    tables = token_embedding, position_embedding, type_embedding
    return _Embedded.apply(*indices, *tables, scale, padding, drop.noise())


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        positions: Tensor,
        types: Tensor | None,
        token: Tensor,
        position: Tensor | None,
        kind: Tensor | None,
        scale: float,
        padding: int | None,
        noise: Noise | None,
    ) -> Tensor:
        ctx.save_for_backward(ids, positions, types)
        ctx.rows = [0 if table is None else len(table) for table in (token, position, kind)]
        ctx.scale, ctx.padding, ctx.noise = scale, padding, noise
        T, C = len(ids), token.shape[1]
        for name, table in (("token", token), ("position", position), ("type", kind)):
            if table is not None:
                check(table, f"the {name} embedding", token.dtype, (len(table), C))
        for name, index in (("ids", ids), ("positions", positions), ("types", types)):
            check(index, name, torch.int64, (T,))
        out = token.new_empty(T, C)
        if T:
            native.loaded("train_embedding").eet_train_embed(
                out=at(out), ids=ids.data_ptr(), positions=positions.data_ptr(),
                types=None if types is None else types.data_ptr(), token=at(token), position=at(position),
                type=at(kind), scale=scale, **drop_arguments(noise, T), dtype=DTYPES[out.dtype], T=T, C=C,
                stream=stream_of(out),
            )  # fmt: skip
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dout = grads[0].contiguous()
        how = ((ctx.scale, ctx.padding), (1.0, None), (1.0, None))
        tables = [
            table_gradient(dout, index, rows, *each, ctx.noise) if wanted else None
            for index, rows, each, wanted in zip(
                ctx.saved_tensors, ctx.rows, how, ctx.needs_input_grad[3:6], strict=True
            )
        ]
        return None, None, None, *tables, None, None, None


def table_gradient(
    dout: Tensor, index: Tensor | None, num_rows: int, scale: float, padding: int | None, noise: Noise | None
) -> Tensor:
    """The gradient of a table [V,C] whose row index[t] became token t: drop(dout) [T,C], added up in the tokens' order.

    No index: all are row 0. The row `padding` gets none.
    """
    T, C = dout.shape
    table = dout.new_zeros(num_rows, C)
    if not T:
        return table
    if index is None:
        keys, order = torch.zeros(T, dtype=torch.int32, device=dout.device), torch.arange(T, device=dout.device)
    else:
        keys, order = index.to(torch.int32).sort(stable=True)
    edges = torch.empty(ceil(T, PART), 2, C, dtype=torch.float32, device=dout.device)
    native.loaded("train_embedding").eet_train_embed_backward(
        dtable=at(table), edges=at(edges), dout=at(dout), keys=at(keys), order=at(order), scale=scale,
        padding=-1 if padding is None else padding, **drop_arguments(noise, T), dtype=DTYPES[dout.dtype], T=T, C=C,
        stream=stream_of(dout),
    )  # fmt: skip
    return table
