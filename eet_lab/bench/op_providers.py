"""What can stand in for an op: PyTorch's own functions, FlashInfer, and our kernels with several rows at a time.

Attention by others is PyTorch's SDPA in each of its kernels, its varlen call, and FlashInfer's decode. Ours of training
are the pieces of the recipe "all", where its techniques put them: what a technique brings is measured as soon as it is
registered, and what none has brought is plain PyTorch. To add a provider: an `OpProvider` in a tuple.

T tokens, B rows, Q queries a row, K keys, H heads, G KV heads, D head dim.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from eet_lab.bench.rows import OURS
from eet_lab.bench.static_decoder import ACTS
from eet_lab.bench.static_decoder import norm as torch_norm
from eet_lab.bench.timing import LeftOut, missing, no_liger
from eet_lab.bench.train_ops import (
    BETAS,
    DECAY,
    EPS,
    LIGER,
    LR,
    TRAIN_CASES,
    AdamWShape,
    AttentionGradShape,
    CrossEntropyShape,
    Forward,
    Inputs,
    LinearCrossEntropyShape,
    NormGradShape,
    Prepared,
    chunked,
    compiled,
    differentiated,
    eager,
    sdpa_backward,
    torch_update,
    updates,
    with_gradients,
)
from eet_lab.errors import first_line
from eet_lab.models.config import PRESETS
from eet_lab.ops import cuda, native, reference
from eet_lab.ops.cases import Case
from eet_lab.ops.cuda.norm import INTERLEAVED
from eet_lab.ops.int8_cases import Int8Shape
from eet_lab.ops.next_token_case import NextTokenShape
from eet_lab.ops.pieces import composed
from eet_lab.ops.row_cases import NormShape
from eet_lab.ops.shapes import AttentionShape, LinearShape, Shape
from eet_lab.ops.types import Linear, Spec, autograd, fresh
from eet_lab.parts import Parts
from eet_lab.parts.losses import Head
from eet_lab.parts.passes import Batching, Text
from eet_lab.parts.staging import Staging, sent
from eet_lab.texts import as_recipe


@dataclass(frozen=True)
class OpProvider:
    """A way to do some ops. What it leaves out of an op is said in `less`: then its output is not compared.

    `make(shape, inputs)` may lay the inputs out as it likes best: only the call is timed. It raises `LeftOut` for sizes
    that it does not take.
    """

    name: str
    ops: tuple[str, ...]
    make: Callable[[Any, Inputs], Prepared]
    unavailable: Callable[[str], str | None] = lambda device: None
    less: str = ""
    unfit: Callable[[Any], str | None] = lambda shape: None


OPS = ("attention",)
PAGE = 16  # columns of FlashInfer's cache that lie together; vLLM's and SGLang's default
WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation gives its wrappers


def sdpa(backend: SDPBackend, shape: AttentionShape, inputs: Inputs) -> Prepared:
    """Causal SDPA; ragged prompts are padded on the right, where causality hides the pads at no cost."""
    rows, ragged = _rows(shape, inputs), len(set(shape.lengths)) > 1
    q, k, v = map(_padded, zip(*rows, strict=True))
    if shape.decode and not ragged:
        k, v = reference.append(*inputs[:4])[1:]  # the cache as it is, rather than a copy
    mask = _key_mask(shape, q.device) if shape.decode and ragged else None
    causal, gqa = not shape.decode, shape.H > shape.G

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=gqa)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as many as there are reasons why a kernel does not take these sizes
        try:
            call()
        except RuntimeError as error:
            raise LeftOut(f"SDPA's kernel does not take these sizes: {first_line(error)}") from error
    lengths = [len(row[0]) for row in rows]

    def read(out: Tensor) -> Tensor:
        return torch.cat([out[row, :, :length].transpose(0, 1).flatten(1) for row, length in enumerate(lengths)])

    return Prepared(call, read)


def varlen(shape: AttentionShape, inputs: Inputs) -> Prepared:
    """`torch.nn.attention.varlen`: all rows' tokens in one dimension, no pads."""
    from torch.nn.attention.varlen import varlen_attn

    rows = _rows(shape, inputs)
    q, k, v = (torch.cat(parts) for parts in zip(*rows, strict=True))
    queries, keys = ([len(row[part]) for row in rows] for part in (0, 1))
    ends = _ends(queries, q.device), _ends(keys, q.device)
    options: dict[str, Any] = {} if shape.decode else {"window_size": (-1, 0)}  # everything to the left: causal
    if shape.H > shape.G:
        if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
            raise LeftOut(f"torch {torch.__version__}'s varlen_attn takes no grouped heads")
        options["enable_gqa"] = True
    return Prepared(lambda: varlen_attn(q, k, v, *ends, max(queries), max(keys), **options), lambda out: out.flatten(1))


def flashinfer(shape: AttentionShape, inputs: Inputs) -> Prepared:
    """FlashInfer's decode: its call for one row, its planned paged wrapper for more; the plan is not timed."""
    if not shape.decode:
        raise LeftOut("only its decode attention is timed")
    module: Any = import_module("flashinfer")
    rows = _rows(shape, inputs)
    q = torch.cat([row[0] for row in rows])  # [B,H,D]
    grouped = shape.H // shape.G >= 4  # its documentation: tensor cores pay for large groups
    if len(rows) == 1:
        k, v = (part.contiguous() for part in rows[0][1:])
        one = partial(module.single_decode_with_kv_cache, q[0], k, v, use_tensor_cores=grouped)
        return Prepared(one, lambda out: out.view(1, -1))
    pages = [_paged(part) for part in zip(*(row[1:] for row in rows), strict=True)]
    counts = [-(-length // PAGE) for length in shape.lengths]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped)
    last = torch.tensor([(length - 1) % PAGE + 1 for length in shape.lengths], dtype=torch.int32, device=q.device)
    indices = torch.arange(sum(counts), dtype=torch.int32, device=q.device)
    sizes = (shape.H, shape.G, shape.D, PAGE)
    wrapper.plan(_ends(counts, q.device), indices, last, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype)
    return Prepared(lambda: wrapper.run(q, tuple(pages)), lambda out: out.flatten(1))


def _rows(shape: AttentionShape, inputs: Inputs) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Each row's real queries [Q,H,D], and keys and values [K,G,D] with the new ones among them."""
    qkv, kv, batch = inputs[:3]
    q, keys, values = reference.append(qkv, kv, batch, shape.spec)
    found = []
    for row, ((first, count), seen) in enumerate(zip(batch.spans, batch.keys.spans, strict=True)):
        k, v = (cache[row, :, slice(*seen)].transpose(0, 1) for cache in (keys, values))
        found.append((q[first : first + count], k, v))
    return found


def _padded(rows: tuple[Tensor, ...]) -> Tensor:
    """Rows [N,H,D] -> [B,H,N,D] with zeros on the right."""
    return pad_sequence(list(rows), batch_first=True).transpose(1, 2)


def _key_mask(shape: AttentionShape, device: torch.device) -> Tensor:
    """[B,1,1,K]: which keys of right-padded rows are real."""
    lengths = torch.tensor(shape.lengths, device=device)
    return (torch.arange(max(shape.lengths), device=device) < lengths[:, None])[:, None, None]


def _paged(rows: tuple[Tensor, ...]) -> Tensor:
    """Rows [K,G,D] -> pages [P,PAGE,G,D], each row beginning with a page of its own."""
    return torch.cat([F.pad(row, (0, 0, 0, 0, 0, -len(row) % PAGE)).unflatten(0, (-1, PAGE)) for row in rows])


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    """0 and the running sums, int32."""
    return F.pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0)).int()


def _varlen_unavailable(device: str) -> str | None:
    if device != "cuda":
        return "torch's varlen attention needs an NVIDIA GPU"
    if find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen; it came with 2.10"
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" not in inspect.signature(varlen_attn).parameters:
        return f"torch {torch.__version__}'s varlen_attn has no window_size; it came with 2.11"
    return None


def _on_gpu(what: str, device: str) -> str | None:
    return None if device == "cuda" else f"{what} needs an NVIDIA GPU"


ONE_KERNEL = partial(_on_gpu, "this kernel of SDPA")
ATTENTION: tuple[OpProvider, ...] = (
    OpProvider("torch-sdpa-flash", OPS, partial(sdpa, SDPBackend.FLASH_ATTENTION)),
    OpProvider("torch-sdpa-cudnn", OPS, partial(sdpa, SDPBackend.CUDNN_ATTENTION), ONE_KERNEL),
    OpProvider("torch-sdpa-efficient", OPS, partial(sdpa, SDPBackend.EFFICIENT_ATTENTION), ONE_KERNEL),
    OpProvider("torch-varlen", OPS, varlen, _varlen_unavailable),
    OpProvider("flashinfer", OPS, flashinfer, partial(missing, "FlashInfer", "flashinfer-python", ("flashinfer",))),
)


def linear(shape: LinearShape, inputs: Inputs) -> Prepared:
    """The product and the bias alone."""
    x, w = inputs[0], inputs[1] if shape.residual else inputs[2]
    return Prepared(lambda: F.linear(x, w.weight, w.bias))


def called(function: Callable[..., Any]) -> Callable[[Any, Inputs], Prepared]:
    """What calls a function on the inputs as they are."""
    return lambda shape, inputs: Prepared(partial(function, *inputs))


def _int8(shape: Shape) -> str | None:
    has_int8 = isinstance(shape, Int8Shape) or (isinstance(shape, NextTokenShape) and shape.int8)
    return "PyTorch's linear takes no int8 weights" if has_int8 else None


REFERENCE = "it is the reference"
PLAIN = (
    OpProvider(
        "torch-linear", ("norm_linear", "linear_residual"), linear, less="the product alone: nothing around it",
        unfit=_int8,
    ),
    OpProvider(
        "torch-linear-add", ("linear_residual",),
        called(lambda x, w, residual: F.linear(x, w.weight, w.bias) + residual), unfit=_int8,
    ),
    OpProvider(
        "torch-norm-linear", ("norm_linear",),
        called(lambda x, norm, w, act: ACTS[act](F.linear(torch_norm(x, norm), w.weight, w.bias))), unfit=_int8,
    ),
    OpProvider("torch-norm", ("norm",), called(torch_norm)),
    OpProvider(
        "torch-embed", ("embed",),
        called(lambda ids, places, tokens, positions: F.embedding(ids, tokens) + F.embedding(places, positions)),
    ),
    OpProvider(
        "torch-next-token", ("next_token",), called(partial(reference.next_token, empty=fresh)), less=REFERENCE,
        unfit=_int8,
    ),
    OpProvider(  # of the inputs, the last two are positions and sampling
        "torch-choose", ("choose", "choose_top_k"),
        called(lambda logits, *more: reference.choose(logits, *more[-2:])), less=REFERENCE,
    ),
)  # fmt: skip


def interleaved(rows: int, shape: Any, inputs: Inputs) -> Prepared:
    """Our kernel with so many rows at a time."""
    op: Any = cuda.norm if isinstance(shape, NormShape) else cuda.softmax
    native.prepare(op.kernels)
    return Prepared(lambda: op(*inputs, empty=fresh, rows=rows))


ROWS = (
    OpProvider("torch-softmax", ("softmax",), called(partial(torch.softmax, dim=-1))),
    *(
        OpProvider(f"eet_lab-{rows}-rows", ("norm", "softmax"), partial(interleaved, rows), native.available)
        for rows in INTERLEAVED[1:]
    ),
)


@cache
def _parts(device: str) -> Parts:
    """Those of everything that is there for training, with the sources of its kernels built."""
    parts = as_recipe("all", device, PRESETS["gpt2"].in_training).parts
    if kernels := parts.train_ops.kernels:
        native.prepare(kernels)
    return parts


def piece(op: Callable, name: str) -> Callable:
    """What an op is composed of under that keyword, or the reference of that name."""
    plain, bound = composed(op)
    if name in bound:
        return bound[name]
    default = inspect.signature(plain).parameters.get(name)
    return getattr(reference, name) if default is None else default.default


def ours(shape: Any, inputs: Inputs) -> Prepared:
    """The parts' norm, loss or attention, differentiated, or their optimizer's update."""
    if isinstance(shape, AdamWShape):
        return our_update(inputs)
    parts = _parts(inputs[0].device.type)
    forwards: dict[type, Forward] = {
        NormGradShape: partial(piece(parts.train_ops.norm_linear, "norm"), empty=autograd),
        CrossEntropyShape: piece(parts.loss, "cross_entropy"),
        LinearCrossEntropyShape: partial(_our_linear_cross_entropy, parts),
        AttentionGradShape: partial(_our_attention, parts),
    }
    return differentiated(forwards, shape, inputs)


def _our_linear_cross_entropy(parts: Parts, states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    layer = Linear(weight, None)
    head = Head(lambda some, linear=reference.linear: linear(some, layer, empty=autograd), (weight,))
    return parts.loss(states, labels, head)


def _our_attention(parts: Parts, qkv: Tensor) -> Tensor:
    """Attention as a trainer's passes have it: the rows' tokens as the parts lay them out."""
    B, S, _, H, D = qkv.shape
    groups = [*parts.texts([Text([0] * S, None, (0,))] * B, Batching(B * S))]
    ops, outs = parts.train_ops.differentiable(None), []
    for group, some in zip(groups, qkv.split([len(group.texts) for group in groups]), strict=True):
        batch = sent(group.laid_out(), Staging(qkv.device)).batch
        attend = parts.attend(ops, batch, None, empty=autograd, window=None)
        outs.append(attend(0, some.reshape(-1, 3 * H * D), Spec(H, H, D)))
    return torch.cat(outs).view(B, S, H, D)


def our_update(inputs: Inputs) -> Prepared:
    """The parts' optimizer; 16-bit weights have a copy in fp32."""
    own = with_gradients(inputs)
    groups = [{"params": list(own), "weight_decay": DECAY}]
    optimizer = _parts(own[0].device.type).optimizer(groups, "adamw", seed=0, lr=LR, betas=BETAS, eps=EPS)
    return updates(optimizer, own)


def _chunked_unavailable(device: str) -> str | None:
    if hasattr(F, "linear_cross_entropy"):
        return None
    return f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy"


ALL = tuple(case.op for case in TRAIN_CASES)
GRADIENTS = tuple(op for op in ALL if op != "adamw")
LINEAR, LOSS = "linear_cross_entropy", "cross_entropy"
CHUNKED: dict[type, Forward] = {LinearCrossEntropyShape: chunked}
CUDNN = partial(sdpa_backward, SDPBackend.CUDNN_ATTENTION)
TRAINING = (
    OpProvider(OURS, ALL, ours),
    OpProvider("torch-eager", ALL, eager),
    OpProvider("torch-compile", GRADIENTS, compiled, partial(_on_gpu, "PyTorch's compiled code")),
    OpProvider("torch-fused", ("adamw",), partial(torch_update, "fused")),
    OpProvider("torch-linear-cross-entropy", (LINEAR,), partial(differentiated, CHUNKED), _chunked_unavailable),
    OpProvider("torch-cudnn-attention", ("attention_backward",), CUDNN, partial(_on_gpu, "cuDNN's kernel")),
    OpProvider("liger", ("norm_backward", LOSS, LINEAR), partial(differentiated, LIGER), no_liger),
)

PROVIDERS: dict[str, OpProvider] = {provider.name: provider for provider in (*PLAIN, *ROWS, *ATTENTION, *TRAINING)}


def names_for(case: Case) -> tuple[str, ...]:
    """Ours, and everyone who does that case's op."""
    return tuple(dict.fromkeys([OURS, *(name for name in PROVIDERS if provider_of(name, case))]))


def provider_of(name: str, case: Case) -> OpProvider | None:
    """Who does a case's op; None: our kernel of that name."""
    found = PROVIDERS.get(name)
    return found if found and case.op in found.ops else None
