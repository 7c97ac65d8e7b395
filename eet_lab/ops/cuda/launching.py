"""What every op over the kernels shares: addresses, streams, numbers for types, and checks that name what is wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial, update_wrapper
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from eet_lab.errors import KernelError
from eet_lab.ops import native
from eet_lab.ops.fits import Shapes, refuses, unfit
from eet_lab.ops.noise import SEVERAL, Noise
from eet_lab.ops.reference import GATED

DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
ACTS: dict[str | None, int] = {None: 0, "gelu_tanh": 1, "gelu": 2, "relu": 3, "silu": 4, "tanh": 5}
ACTS |= {gated: ACTS[act] for gated, act in GATED.items()}
"""Activations by name, numbered as in csrc/eet/activation.cuh; a gated one has the number of its gates' activation."""
REMEDY = "Plain PyTorch's ops take any: leave the fused kernels out."
"""The remedy for sizes of a model that kernels do not take."""

Op = TypeVar("Op", bound=Callable)


def needs(*kernels: str) -> Callable[[Op], Op]:
    """Tag an op with the sources in csrc/ that it launches from."""

    def tag(op: Op) -> Op:
        op.kernels = kernels  # type: ignore[attr-defined]
        return op

    return tag


@cache
def with_options(op: Callable, **options: Any) -> Callable:
    """The same op with some of its keywords set. Asked again it is the same object, so that Parts compare equal."""
    return update_wrapper(partial(op, **options), op)


def dependent(op: Callable) -> Callable:
    """The same op, whose kernels may begin while the kernel before them still runs (csrc/eet/dependent.cuh)."""
    return refuses(partial(_no_decoder, op))(with_options(op, dependent=True))


def _no_decoder(op: Callable, model: Shapes) -> str | None:
    if not model.spec.causal:
        return "kernels begin early in decode steps, and this model is an encoder"
    return unfit(op, model)


def can_be_dependent(op: Callable) -> bool:
    """Whether there is such a version of it."""
    return "dependent" in inspect.signature(op).parameters


def unfit_act(model: Shapes) -> str | None:
    """Why the kernels do not take a model's layers, or None: the activation."""
    if model.act in ACTS:
        return None
    return f"the kernels know the activations {', '.join(filter(None, ACTS))}, not {model.act}"


def unfit_width(model: Shapes) -> str | None:
    """Why a kernel over hidden states does not take a model, or None."""
    C = model.hidden_size
    return f"the kernels take a multiple of 8 channels, and the model has {C:,}" if C % 8 else None


def unfit_widths(model: Shapes) -> str | None:
    """The same of a kernel that is also run on what layers have inside."""
    if model.ffn_size % 8:
        return f"the kernels take a multiple of 8 channels, and the model's layers have {model.ffn_size:,} inside"
    return unfit_width(model)


def unfit_layers(model: Shapes) -> str | None:
    """The same of one that is run with their activation."""
    return unfit_widths(model) or unfit_act(model)


def number_of(act: str | None) -> int:
    """An activation's number; KernelError where kernels have none of this name."""
    if act not in ACTS:
        raise KernelError(f"There is no activation {act!r}; there are {', '.join(filter(None, ACTS))}. {REMEDY}")
    return ACTS[act]


def untrainable(dtype: torch.dtype) -> str | None:
    """Why the kernels do not train weights of a type, or None."""
    if dtype in DTYPES:
        return None
    names = (str(each).removeprefix("torch.") for each in (*DTYPES, dtype))
    return "the kernels compute in {}, {} and {}, not {}. Load the model in bfloat16".format(*names)


class Limits(NamedTuple):
    """The limits of a GPU."""

    shared_bytes: int  # of shared memory that a block can have
    num_blocks: int  # its multiprocessors
    is_hopper: bool = True  # and has tensor cores that multiply tiles in shared memory


HOPPER = Limits(227 * 1024, 132)  # where there is no GPU to ask


@cache
def limits() -> Limits | None:
    """The limits of every GPU that there is; None where there are two kinds, or no GPU."""
    kinds = {_limits_of(number) for number in range(torch.cuda.device_count())} if torch.cuda.is_available() else ()
    return next(iter(kinds)) if len(kinds) == 1 else None


@cache
def _limits_of(number: int) -> Limits:
    properties: Any = torch.cuda.get_device_properties(number)
    is_hopper = (properties.major, properties.minor) == (9, 0)
    return Limits(properties.shared_memory_per_block_optin, properties.multi_processor_count, is_hopper)


def gpu() -> Limits:
    """The limits of the GPU that is launched on; those of an H100 where there is none.

    Each launch asks, and where all GPUs are of one kind torch need not say which one is current.
    """
    return limits() or (_limits_of(torch.cuda.current_device()) if torch.cuda.is_available() else HOPPER)


@cache
def _are_available(device: torch.device) -> bool:
    return native.available(device) is None


def takes(x: Tensor) -> bool:
    """Whether kernels can be built for a tensor's device, and take its dtype: for interfaces that take any."""
    return x.is_cuda and x.dtype in DTYPES and _are_available(x.device)


def stream_of(x: Tensor) -> int:
    """The stream that torch launches on at present."""
    return torch._C._cuda_getCurrentRawStream(x.device.index)


def at(x: Tensor | None) -> int | None:
    """The address for a launcher; kernels read 16 bytes at a time."""
    if x is None:
        return None
    address = x.data_ptr()
    if address % 16:
        raise KernelError(
            f"A tensor {tuple(x.shape)} begins at {address:#x}; kernels need a multiple of 16 bytes. Give its clone()."
        )
    return address


def check(x: Tensor | None, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """KernelError where a tensor, if there is one, is not what the kernel needs."""
    if x is not None and (x.shape != shape or x.dtype != dtype or not x.is_contiguous()):
        raise KernelError(
            f"{name} is {tuple(x.shape)} {x.dtype}{'' if x.is_contiguous() else ', not contiguous'}; "
            f"the kernel needs {tuple(shape)} {dtype}, contiguous. {_made_fit(x, dtype, shape)}"
        )


def drop_arguments(noise: Noise | None, T: int) -> dict[str, Any]:
    """What a call drops, for launchers (csrc/eet/drop.cuh)."""
    if noise is None:
        return {"drop_tokens": None, "drop_call": 0, "drop_below": 0, "drop_scale": 1.0}
    check(noise.tokens, "the keys of what is dropped", torch.int64, (T,))
    below, scale = int(noise.p * SEVERAL), 1 / (1 - noise.p)
    return {
        "drop_tokens": noise.tokens.data_ptr(), "drop_call": noise.call, "drop_below": below, "drop_scale": scale,
    }  # fmt: skip


def _made_fit(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """What to do with a tensor that the kernel does not take as it is."""
    if x.shape != shape:
        return "Give one of that shape."
    return "Give its contiguous()." if x.dtype == dtype else f"Convert it with to({dtype})."
