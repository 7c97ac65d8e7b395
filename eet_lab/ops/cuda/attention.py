"""Attention over the KV cache.

T tokens, B rows, Q queries a row, K columns of the cache, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops import native
from eet_lab.ops.attention import within_window
from eet_lab.ops.cuda.launching import DTYPES, REMEDY, at, check, gpu, needs, stream_of
from eet_lab.ops.cuda.plan import paired_bytes
from eet_lab.ops.cuda.rotary import NO_ROTATION, is_rotated, rotary, rotation
from eet_lab.ops.fits import Shapes, reads_rows_on_device, refuses
from eet_lab.ops.types import KV, NO_EXTRAS, Batch, Empty, Extras, Spec


class Split(NamedTuple):
    """The kernel of decode attention, and how it divides a row and KV head; 0 leaves it to the launcher.

    `decode_attention` reads keys into registers; `stream_attention` through shared memory, and so does
    `balanced_attention`, of which eight blocks share eight rows: they need Hopper and a head dim of STREAM_DIMS.
    """

    kernel: str
    blocks: int = 0  # of a cluster: 1, 2, 4 or 8; more than one needs Hopper; none of `balanced_attention`
    warps: int = 0  # of a block of `decode_attention`: 4 or 8, with `blocks`


STREAM_DIMS = (64, 128)
ROTATED_DIMS = (64, 128)  # of heads that decode attention norms and rotates itself, in 16 bits
STREAM_HEADS = 8  # of a KV head that a block serves
STREAM_COLUMNS = 256  # fewer are read into registers at once
STREAM_ALONE = 2048  # the same for one or two rows: `persistent_layers` leaves a stream no room to begin early
STREAM_MOST = 2048  # columns at most, where a multiprocessor has more than one block
BALANCED_ROWS = 8  # of a cluster
BALANCED_COLUMNS = {64: 2048, 128: 4096}  # by head dim: of more, rows of equal lengths lose little (LOG)
CLUSTERS = (1, 2, 4, 8)  # blocks of a cluster
WARPS = (4, 8)  # of a block that reads into registers
MOST_STRIDE = 2**31 - 1  # numbers from row to row, and head to head, that decode attention counts in an int
MAX_HEAD_DIM = 256
TILE = 16  # columns that decode attention reads at a time, from one page
WIDE_HEAD_DIM = 40  # Hopper's own kernel pads narrower heads to 64, the other one to 32


def unfit(model: Shapes) -> str | None:
    """Why the kernels do not take a model's attention, or None."""
    if problem := _beyond(model.spec):
        return problem
    D = model.spec.head_dim
    if D % 8 or D > MAX_HEAD_DIM:
        return f"the attention kernels take heads of a multiple of 8, at most {MAX_HEAD_DIM}, and these have {D}"
    return None


@cache
def _beyond(spec: Spec) -> str | None:
    """What an attention asks of the kernels that they do not know, or None."""
    beyond = {
        "a window of tokens that see what comes after them": spec.window is not None and not spec.causal,
        "a scale that is not positive": spec.scale is not None and spec.scale <= 0,
        "a bias of relative positions": spec.max_distance > 0,
    }
    found = [name for name, there in beyond.items() if there]
    return f"the attention kernels do not take {' or '.join(found)}" if found else None


@refuses(unfit)
@needs("rotary", "append", "decode_attention", "prefill_attention", "plain_attention")
def masked_attention(
    qkv: Tensor,
    kv: KV | None,
    batch: Batch,
    spec: Spec,
    extras: Extras = NO_EXTRAS,
    *,
    mask: Tensor,
    empty: Empty,
    dependent: bool = False,
    split: Split | None = None,
) -> Tensor:
    """Attention over all K columns with an additive mask [B,1,Q,K]: [T,(H+2G)D] -> [T,HD].

    The same kernels as `attention`; they read every column and the mask, pads included.
    """
    return _attend(qkv, kv, batch, spec, extras, mask, empty, dependent, split)


@reads_rows_on_device
@refuses(unfit)
@needs(*masked_attention.kernels, "stream_attention", "balanced_attention", "hopper_attention")  # type: ignore[attr-defined]
def attention(
    qkv: Tensor,
    kv: KV | None,
    batch: Batch,
    spec: Spec,
    extras: Extras = NO_EXTRAS,
    *,
    empty: Empty,
    dependent: bool = False,
    split: Split | None = None,
) -> Tensor:
    """Attention without a mask: a query sees columns num_pad .. its own, or the last of them. [T,(H+2G)D] -> [T,HD].

    A pad's own output is 0.

    One token a row: one launch, which also writes the cache; in 16 bits `split` says how it divides rows. A `dependent`
    one reads earlier columns at once, so they must stem from earlier steps: not for a cache that grows. More tokens: a
    launch that writes the cache, and one that attends; on Hopper one does both, where all that a query may see is new
    and no token is a pad. float32 takes a kernel without tensor cores. A row's new columns are consecutive.
    Without a cache, the tokens of a pass see each other: one launch, and one more where tokens are pads.
    Norms of heads and rotary positions belong to that launch for one token a row (`rotates`), and are one more before
    all others, which changes qkv in place.
    """
    return _attend(qkv, kv, batch, spec, extras, None, empty, dependent, split)


def _attend(
    qkv: Tensor,
    kv: KV | None,
    batch: Batch,
    spec: Spec,
    extras: Extras,
    mask: Tensor | None,
    empty: Empty,
    dependent: bool,
    split: Split | None,
) -> Tensor:
    if problem := _beyond(spec):  # sizes are told by the checks that see the tensors
        raise KernelError(f"This model cannot run so: {problem}. {REMEDY}")
    if kv is None:
        return _attend_within(qkv, batch, spec, extras, mask, empty, dependent)
    if not spec.causal:
        raise KernelError(f"Queries that see what comes after them take no KV cache. {REMEDY}")
    if batch.one_each and spec.window is not None and mask is None:  # as an attend part does once for all layers
        batch = within_window(batch, spec.window, empty)
    (keys, values), table = kv, batch.keys.table
    (T, width), (_, G, page, D) = qkv.shape, keys.shape
    H, B, K = width // D - 2 * G, batch.num_rows, batch.max_kv
    _check_attention(qkv, keys, values, H, G, D)
    if T == B and qkv.dtype != torch.float32:
        _check_decode(keys, split)
    out = empty("attended", (T, H * D), qkv)
    if qkv.is_meta or not T:
        return out
    if batch.num_dummy:  # a block of attention may load them beside a row's own, and no number times 0 is none
        out[batch.num_read :].zero_()
    if mask is not None:
        check(mask, "mask", qkv.dtype, (B, 1, T // B, K))
    one_each = batch.one_each or (T == B and mask is not None)
    turned = NO_ROTATION
    if is_rotated(spec, extras):
        if one_each and rotates(D, qkv.itemsize):
            turned = rotation(qkv, batch.positions, spec, extras)
        else:
            rotary(qkv, batch.positions, spec, extras, dependent=dependent)
    paging = NO_PAGES if table is None else _paging(table, page, B, K)
    columns, (row, head, key, _) = batch.columns, keys.stride()
    arguments = {
        "out": at(out), "keys": at(keys), "values": at(values), "qkv": at(qkv), "columns": columns.data_ptr(),
        "columns_stride": columns.stride(0), "row_stride": row, "head_stride": head, "key_stride": key, "H": H, "G": G,
        "D": D, "stream": stream_of(qkv),
    }  # fmt: skip
    cached = _Cached(qkv, mask is None and key == D, mask, batch, K, _scores(spec, batch, mask), arguments, paging)
    if one_each and qkv.dtype != torch.float32:
        _decode(cached, turned, split, dependent)
    else:
        _append_and_attend(cached)
    return out


class _Cached(NamedTuple):
    """A launch over a KV cache."""

    qkv: Tensor
    can_stream: bool  # a head's columns lie side by side, and there is no mask
    mask: Tensor | None
    batch: Batch
    K: int
    scores: tuple[int, float]  # the window, and what they are multiplied by
    arguments: dict[str, Any]  # that all launchers take
    paging: dict[str, int | None]  # the same of those that read pages


def _decode(cached: _Cached, turned: dict[str, Any], split: Split | None, dependent: bool) -> None:
    """One token a row, in 16 bits: a launch that also writes the cache."""
    qkv, _, mask, batch, K, (window, scale), how, paging = cached
    B, H, G, D, seen = len(qkv), how["H"], how["G"], how["D"], window or K
    can_stream = cached.can_stream and D in STREAM_DIMS and _is_hopper(qkv.device.index)
    if split is None:
        split = Split((can_stream and _streaming(B, H, G, D, seen)) or "decode_attention")
    is_streamed = split.kernel != "decode_attention"
    if is_streamed and not can_stream:
        raise KernelError(
            f"{split} needs Hopper, no mask, a head dim of {STREAM_DIMS} and its columns side by side, but this is "
            f"{torch.cuda.get_device_name(qkv.device)}, the head dim is {D}, columns are {how['key_stride']} numbers "
            f"apart, and mask is {'' if mask is None else 'not '}None. Leave split out."
        )
    how |= turned
    how |= paging
    how |= {
        "num_pad": batch.keys.begin.data_ptr(), "dtype": DTYPES[qkv.dtype], "B": B, "scale": scale,
        "dependent": dependent,
    }  # fmt: skip
    if is_streamed:
        how["shared_bytes"] = paired_bytes(False, gpu().shared_bytes)
    else:
        how |= {"mask": at(mask), "K": K, "warps": split.warps}
    if split.kernel != "balanced_attention":
        how |= {"seen": seen, "cluster": split.blocks}
    getattr(native.loaded(split.kernel), f"eet_{split.kernel}")(**how)


def _append_and_attend(cached: _Cached) -> None:
    """Any tokens: a launch that writes the cache, and one that attends; Hopper's own kernel does both where it can."""
    qkv, _, mask, batch, K, (window, scale), how, paging = cached
    T, B, D, longest = batch.num_read, batch.num_rows, how["D"], batch.max_q
    has_pads, all_new = _of_rows(batch)
    rows, dtype = batch.rows.data_ptr(), {"dtype": DTYPES[qkv.dtype]}
    how |= {"first": batch.first.data_ptr(), "count": batch.count.data_ptr()}
    in_pages = paging["table"] is not None
    on_hopper = mask is None and _takes_hopper(qkv, D) and (all_new or not in_pages)  # copied are rectangles
    appends = on_hopper and all_new and not in_pages
    if not appends:
        zeroed = {"out": how["out"] if mask is None and has_pads else None}
        native.loaded("append").eet_append(**how | zeroed, **paging, **dtype, rows=rows, T=T)
    how |= {"num_pad": batch.keys.begin.data_ptr(), "K": K, "window": window, "scale": scale, "causal": True}
    if on_hopper:
        attend = native.loaded("hopper_attention").eet_hopper_attention
        attend(**how, **dtype, T=T, B=B, longest=longest, all_new=all_new, appends=appends)
    elif qkv.dtype == torch.float32:
        native.loaded("plain_attention").eet_plain_attention(**how, **paging, mask=at(mask), rows=rows, T=T)
    else:
        attend = native.loaded("prefill_attention").eet_prefill_attention
        attend(**how, **paging, **dtype, mask=at(mask), B=B, longest=longest if mask is None else T // B)


def _of_rows(batch: Batch) -> tuple[bool, bool]:
    """Whether some of the tokens are pads, and whether all that the rows may see is new, as far as the host knows."""
    if batch.spans is None or batch.keys.spans is None:
        return True, False
    counts = [count for _, count in batch.spans]
    has_pads = sum(counts) < batch.num_read
    seen = (end - begin for begin, end in batch.keys.spans)
    return has_pads, not has_pads and all(not new or new == old for new, old in zip(counts, seen, strict=True))


def _attend_within(
    qkv: Tensor, batch: Batch, spec: Spec, extras: Extras, mask: Tensor | None, empty: Empty, dependent: bool
) -> Tensor:
    """Attention whose keys and values stay where they are, in qkv."""
    (T, width), B, (H, G, D), Q = qkv.shape, batch.num_rows, spec[:3], batch.max_kv
    out = empty("attended", (T, H * D), qkv)
    if qkv.is_meta or not T:
        return out
    _check_heads(qkv, H, G, D)
    if mask is not None:
        check(mask, "mask", qkv.dtype, (B, 1, T // B, T // B))
    elif batch.keys.padded if batch.spans is None else _of_rows(batch)[0]:
        out.zero_()
    if is_rotated(spec, extras):
        rotary(qkv, batch.positions, spec, extras, dependent=dependent)
    first, (window, scale) = batch.first.data_ptr(), _scores(spec, batch, mask)
    how = {
        "out": at(out), "qkv": at(qkv), "first": first, "count": batch.count.data_ptr(), "columns_stride": 1,
        "H": H, "G": G, "D": D, "window": window, "scale": scale, "causal": spec.causal, "stream": stream_of(qkv),
    }  # fmt: skip
    if mask is None and _takes_hopper(qkv, D):
        native.loaded("hopper_attention").eet_hopper_attention(
            **how, keys=None, values=None, num_pad=batch.keys.begin.data_ptr(), columns=batch.columns.data_ptr(),
            row_stride=0, head_stride=0, key_stride=0, dtype=DTYPES[qkv.dtype], T=T, B=B, longest=Q, K=Q,
            all_new=True, appends=False,
        )  # fmt: skip
        return out
    K = T // B
    # A column is a token of the pass, or with a mask one of its row.
    token = batch.columns if mask is not None else torch.arange(T, device=qkv.device)
    how |= {
        "keys": at(qkv[:, H * D :]), "values": at(qkv[:, (H + G) * D :]), "mask": at(mask), "num_pad": first,
        "columns": token.data_ptr(), "row_stride": width * K if mask is not None else 0, "head_stride": D,
        "key_stride": width, "K": K, **NO_PAGES,
    }  # fmt: skip
    if qkv.dtype == torch.float32:
        native.loaded("plain_attention").eet_plain_attention(**how, rows=batch.rows.data_ptr(), T=T)
    else:
        longest = Q if mask is None else K
        native.loaded("prefill_attention").eet_prefill_attention(**how, dtype=DTYPES[qkv.dtype], B=B, longest=longest)
    return out


def _scores(spec: Spec, batch: Batch, mask: Tensor | None) -> tuple[int, float]:
    """For launchers: the window, 0 where it hides nothing or a mask does, and what scores are multiplied by."""
    hides = mask is None and spec.window is not None and spec.window < batch.max_kv
    return (spec.window or 0) if hides else 0, spec.head_dim**-0.5 if spec.scale is None else spec.scale


def rotates(head_dim: int, itemsize: int) -> bool:
    """Whether decode attention norms and rotates heads itself; the same answer without a GPU."""
    return itemsize == 2 and head_dim in ROTATED_DIMS


NO_PAGES: dict[str, int | None] = {"table": None, "table_stride": 0, "log_page": 0}


def _paging(table: Tensor, page: int, B: int, K: int) -> dict[str, int | None]:
    """For launchers: the block table, how many blocks a row has there, and the logarithm of a page's columns."""
    if page < TILE or page & (page - 1):
        raise KernelError(f"A page has {page} columns; kernels need a power of two from {TILE} on. {REMEDY}")
    check(table, "block_table", torch.int32, (B, max(table.shape[1], -(-K // page))))
    return {"table": table.data_ptr(), "table_stride": table.stride(0), "log_page": page.bit_length() - 1}


def _streaming(B: int, H: int, G: int, D: int, K: int) -> str | None:
    """The kernel that streams keys and values, where one is faster beside the kernels of a layer (LOG).

    By shapes alone, so that techniques that promise the same bits do not change them. Rows share blocks where one that
    is long among short ones would be all that a step waits for; then the lengths of a row's neighbours decide the order
    of its sums, too.
    """
    is_large = _jobs(B, H, G) > gpu().num_blocks
    if is_large and B >= BALANCED_ROWS and BALANCED_COLUMNS[D] < K:
        return "balanced_attention"
    fewest = STREAM_COLUMNS if B > 2 else STREAM_ALONE
    return "stream_attention" if fewest < K and (K <= STREAM_MOST or not is_large) else None


def _jobs(B: int, H: int, G: int) -> int:
    """Blocks that read a whole row and KV head."""
    return B * G * -(-(H // G) // STREAM_HEADS)


def _takes_hopper(qkv: Tensor, head_dim: int) -> bool:
    return qkv.dtype != torch.float32 and head_dim >= WIDE_HEAD_DIM and _is_hopper(qkv.device.index)


@cache
def _is_hopper(device: int) -> bool:
    """Of this device: a machine may have others too, and `gpu` tells of one."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def _check_decode(keys: Tensor, split: Split | None) -> None:
    """KernelError for what the launchers would refuse at the first decode step; a meta trace raises it before."""
    row, head, column, _ = keys.stride()
    if row > MOST_STRIDE or head > MOST_STRIDE or 2 * column > MOST_STRIDE:
        raise KernelError(
            f"The KV cache has {row:,} numbers from row to row, {head:,} from head to head and {column:,} from column "
            f"to column; decode attention takes at most {MOST_STRIDE:,}, and half of that from column to column. Use "
            "fewer columns, or keep them in pages: memory_reuse:kv=paged."
        )
    if split is None:
        return
    own, divided = split.blocks == split.warps == 0, split.blocks in CLUSTERS
    allowed = {
        "decode_attention": own or (divided and split.warps in WARPS),
        "stream_attention": own or (divided and not split.warps),
        "balanced_attention": own,
    }
    if split.kernel not in allowed:
        raise KernelError(f"{split} names {split.kernel!r}, but decode attention has {', '.join(allowed)}. Take one.")
    if not allowed[split.kernel]:
        raise KernelError(
            f"{split} has {split.blocks} blocks and {split.warps} warps, but a cluster has 1, 2, 4 or 8 blocks, of 4 "
            "or 8 warps. Leave `warps` at 0 for stream_attention, both for balanced_attention, or all out: then the "
            "launcher chooses."
        )


def _check_attention(qkv: Tensor, keys: Tensor, values: Tensor, H: int, G: int, D: int) -> None:
    if qkv.dtype not in DTYPES or keys.dtype != qkv.dtype or values.dtype != qkv.dtype:
        raise KernelError(
            f"qkv is {qkv.dtype} and the cache {keys.dtype}; kernels take one of {list(DTYPES)} for both. "
            "Load the model in one of these."
        )
    _check_heads(qkv, H, G, D)
    if keys.stride() != values.stride() or keys.stride(3) != 1 or any(stride % 8 for stride in keys.stride()[:3]):
        raise KernelError(
            f"Keys and values have strides {keys.stride()} and {values.stride()}; kernels need the same for both, "
            "the last 1, the others multiples of 8. Make both contiguous."
        )


def _check_heads(qkv: Tensor, H: int, G: int, D: int) -> None:
    if qkv.dtype not in DTYPES:
        raise KernelError(f"qkv is {qkv.dtype}; kernels take one of {list(DTYPES)}. Load the model in one of these.")
    if D % 8 or D > MAX_HEAD_DIM:
        raise KernelError(f"The head dim is {D}; kernels need a multiple of 8, at most {MAX_HEAD_DIM}. {REMEDY}")
    if H <= 0 or H % G or qkv.shape[1] != (H + 2 * G) * D or not qkv.is_contiguous():
        raise KernelError(
            f"qkv {tuple(qkv.shape)} is not contiguous [T,(H+2G)D] with {G} KV heads of {D}, H a multiple of {G}. "
            f"Make it contiguous, with a width of {D} times a number of heads. {REMEDY}"
        )
