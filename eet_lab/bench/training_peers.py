"""Those who train beside us: transformers as PyTorch trains it, plain, compiled, and with Liger's kernels."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.bench.timing import LeftOut
from eet_lab.errors import ModelError
from eet_lab.models.config import EncoderConfig, Seq2SeqConfig, VisionConfig
from eet_lab.models.families import settings_of
from eet_lab.models.weights import state_of
from eet_lab.ops.oom import memory_for
from eet_lab.training import IGNORED, Example
from eet_lab.words import counted


class Peer(NamedTuple):
    """How transformers trains: by which attention, with PyTorch's fused AdamW or not, compiled by which mode."""

    attention: str = "sdpa"
    fused: bool = True
    mode: str | None = None
    liger: bool = False


PEERS = {
    "hf-eager": Peer("eager", fused=False),
    "hf-sdpa": Peer(),
    "hf-liger": Peer(liger=True),
    "hf-compile": Peer(mode="default"),
    "hf-reduce-overhead": Peer(mode="reduce-overhead"),
    "hf-max-autotune": Peer(mode="max-autotune"),
}
"""transformers: plain; with SDPA and PyTorch's fused AdamW; and compiled, or with Liger's kernels, besides. In 16 bits
by autocast.
"""
GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes that replay CUDA graphs."""


class Checked(NamedTuple):
    """The loss of the batch and the norm of its gradient, before any update."""

    loss: float
    grad_norm: float

    def error(self, exact: Checked) -> float:
        """The larger of both relative errors; infinite where one of the numbers is not finite."""
        return largest(abs(mine / theirs - 1) for mine, theirs in zip(self, exact, strict=True))


class Sized(NamedTuple):
    """One who trains, once made: so many of its steps, what it told of the first batch, and the bytes that it holds."""

    steps: Callable[[int], Any]
    checked: Checked
    held_bytes: int
    remark: str = ""


def largest(errors: Iterable[float]) -> float:
    """The largest error, 0 of none; infinite where one is not a number, which `max` may pass over."""
    found = list(errors)
    return max(found, default=0.0) if all(map(math.isfinite, found)) else math.inf


def allocated(device: torch.device) -> int:
    """Bytes that torch has handed out; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def norm_of(grads: Any) -> float:
    """The norm of all gradients."""
    return float(torch.stack([grad.float().norm() for grad in grads]).norm())


@memory_for("what transformers trains")
def peer(network: Any, name: str, examples: Sequence[Example], dropout: float) -> Sized:
    """transformers' model with the same weights in fp32, which autocast multiplies in the model's own dtype.

    Compiled are its forward and its backward pass, for this batch's shape alone.
    """
    how, device = PEERS[name], network.device
    if how.mode in GRAPHS and device.type != "cuda":
        raise LeftOut(f"{how.mode} needs an NVIDIA GPU")
    before = allocated(device)
    model = _to_hf(network, dropout, attn_implementation=how.attention)
    batch = _padded(examples, network.config, device)
    patched = _with_liger(model) if how.liger else nullcontext
    half = network.dtype != torch.float32
    optimizer = torch.optim.AdamW(model.parameters(), fused=how.fused and device.type == "cuda")
    run = _compiled(model, how.mode) if how.mode else model

    def loss(read: Callable[..., Any]) -> Tensor:
        if how.mode in GRAPHS:
            torch.compiler.cudagraph_mark_step_begin()
        with patched(), torch.autocast(device.type, network.dtype) if half else nullcontext():
            return read(**batch).loss

    def step() -> float:
        found = loss(run)
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(found.detach())

    # Noise cannot be compared: what drops numbers is checked without, and then need not be compiled for it.
    model.train(not dropout)
    found = loss(model if dropout else run)
    found.backward()
    checked = Checked(float(found.detach()), norm_of(p.grad for p in model.parameters() if p.grad is not None))
    del found
    optimizer.zero_grad(set_to_none=True)
    model.train()
    step()
    held, remark = allocated(device) - before, _in_parts(name) if how.mode else ""
    return Sized(lambda num: [step() for _ in range(num)], checked, held, remark)


def _compiled(model: Any, mode: str) -> Any:
    """The model, to be compiled for one shape."""
    torch._dynamo.utils.counters.clear()
    return torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)


def _in_parts(name: str) -> str:
    """What was not compiled as one graph; nothing where all was. LeftOut where PyTorch compiled nothing."""
    counters = torch._dynamo.utils.counters
    if not counters["stats"]["unique_graphs"]:
        raise LeftOut("PyTorch compiled nothing of it")
    breaks = counters["graph_break"]
    if not breaks:
        return ""
    num, why = counted(sum(breaks.values()), "graph break"), next(iter(breaks)).partition("\n")[0]
    return f"{name} was not compiled as a whole: {num}, {why}."


def _with_liger(model: Any) -> Callable[[], AbstractContextManager[None]]:
    """Give a model of transformers Liger's kernels, as Liger does; what it makes has to surround the model's calls.

    Liger also replaces functions of transformers' module, for all models: they are put back, and are there within.
    """
    if model.device.type != "cuda":
        raise LeftOut("Liger's kernels need an NVIDIA GPU")
    if not (find_spec("liger_kernel") and find_spec("triton")):
        raise LeftOut("Liger is not installed: pip install liger-kernel")
    known = import_module("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = model.config.model_type
    if kind not in known:
        raise LeftOut(f"Liger has no kernels for {kind} models")
    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    known[kind](model=model)
    theirs = {name: value for name, value in names.items() if name in before and before[name] is not value}
    names.update({name: before[name] for name in theirs})
    return partial(_replaced, names, theirs)


@contextmanager
def _replaced(names: dict[str, Any], others: Mapping[str, Any]) -> Iterator[None]:
    """Some of a module's names stand for others."""
    own = {name: names[name] for name in others}
    names.update(others)
    try:
        yield
    finally:
        names.update(own)


def _to_hf(network: Any, dropout: float, **how: Any) -> Any:
    import transformers

    told = settings_of(network.config)
    config = transformers.AutoConfig.for_model(told.pop("model_type"), **told)
    for name in [name for name in vars(config) if "drop" in name and isinstance(getattr(config, name), float)]:
        setattr(config, name, dropout)
    kind = getattr(transformers, told["architectures"][0])
    state = {name: tensor.to(torch.float32, copy=True) for name, tensor in state_of(network).items()}
    # It knows checkpoints' names of weights, which are not those of a live model in all versions.
    model, loading = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True, **how
    )
    if untold := [*loading["missing_keys"], *loading["unexpected_keys"]]:
        raise ModelError(f"transformers has no such model: {', '.join(untold)} are in one of both only.")
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # its default, without the warning at which a compiler would part the graph
    return model.to(network.device)


def _padded(examples: Sequence[Example], config: Any, device: torch.device) -> dict[str, Tensor]:
    """The batch as transformers reads it."""
    if isinstance(config, VisionConfig):
        pixels = torch.stack([example.pixels for example in examples if example.pixels is not None])
        return {"pixel_values": pixels.to(device), "labels": torch.tensor([e.labels for e in examples], device=device)}
    longest = max(len(example.ids) for example in examples)
    ids = torch.tensor([[*e.ids, *[0] * (longest - len(e.ids))] for e in examples], device=device)
    lengths = torch.tensor([len(e.ids) for e in examples], device=device)
    real = torch.arange(longest, device=device) < lengths[:, None]
    batch = {"input_ids": ids} if bool(real.all()) else {"input_ids": ids, "attention_mask": real.long()}
    if isinstance(config, EncoderConfig):
        return batch | {"labels": torch.tensor([e.labels for e in examples], device=device)}
    if isinstance(config, Seq2SeqConfig):
        answers = [[*e.labels, *[IGNORED] * (longest - len(e.ids))] for e in examples]  # type: ignore[misc]
        return batch | {"labels": torch.tensor(answers, device=device)}
    return batch | {"labels": torch.where(real, ids, IGNORED)}
