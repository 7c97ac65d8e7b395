"""Peers: what the user would run otherwise, with the same weights and prompts, or on the same batch of training.

They are the modes of transformers' `generate`, left-padded and greedy, and PyTorch's own functions (`static_decoder`).
`PEERS` names them all; each knows why it cannot run on a device. To add one: a `Peer`, and its line in `PEERS` and
`make`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import StringIO
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.bench.launches import STEPS, StepLaunches, counting
from eet_lab.bench.run_memory import allocated
from eet_lab.bench.static_decoder import Peer, Rows, Timing, TorchCompile, TorchGraphs, left_padded
from eet_lab.bench.timing import LeftOut, Stopwatch, no_liger
from eet_lab.engine.settings import Settings
from eet_lab.errors import ModelError, OutOfMemory, first_line
from eet_lab.models.config import EncoderConfig, Seq2SeqConfig, VisionConfig
from eet_lab.models.decoder import Decoder
from eet_lab.models.encoder import Encoder
from eet_lab.models.families import settings_of
from eet_lab.models.table import HEAD
from eet_lab.models.weights import state_of
from eet_lab.ops.oom import memory_for
from eet_lab.training import IGNORED, Example
from eet_lab.words import counted


@dataclass(frozen=True)
class Mode:
    """How transformers attends; with `compiled`, a mode of torch.compile, its KV cache is static and a step compiled.

    "reduce-overhead" is what transformers chooses by itself for a static cache, "max-autotune" the best that it
    offers (`CompileConfig`): CUDA graphs, and every matrix product tried in several ways.
    """

    name: str
    attention: str
    compiled: str | None = None

    def unavailable(self, device: str) -> str | None:
        """Why it cannot run on that device, or None."""
        if self.compiled and device != "cuda":
            return "transformers compiles generate on a GPU only"
        return None

    def options(self) -> dict[str, Any]:
        """What `generate` is told."""
        if self.compiled is None:
            return {}
        from transformers import CompileConfig

        return {"cache_implementation": "static", "compile_config": CompileConfig(mode=self.compiled)}


MODES = (
    Mode("hf-eager", "eager"),
    Mode("hf-sdpa", "sdpa"),
    Mode("hf-static-compile", "sdpa", "reduce-overhead"),
    Mode("hf-max-autotune", "sdpa", "max-autotune"),
)


class HuggingFace(Peer):
    """One mode of transformers on one workload. `model` is what `to_hf` made; several modes may share it."""

    def __init__(self, mode: Mode, model: Any, rows: Rows, settings: Settings) -> None:
        super().__init__(model.device, model.get_memory_footprint())
        self.name, self._mode, self._model = mode.name, mode, model
        self._rows, self._num_tokens = rows, settings.max_new_tokens

    def _warm_up(self) -> Timing:
        if self._mode.compiled:
            with redirect_stderr(StringIO()):  # max-autotune tells of every matrix product that it tried
                self.time()  # compile
            self.time()  # record the graphs
        return self.time()

    def time(self) -> Timing:
        clock = Stopwatch(self._model.device.type)
        tokens = self._generate(_Calls(lambda index: clock.mark())).cpu()
        clock.mark()
        return Timing.of(clock.read_ms(), tokens)

    def launches(self) -> StepLaunches | None:
        """The mean of 8 steps in the middle of a run; None for runs that are too short for it."""
        if self._num_tokens < STEPS + 3:
            return None
        found = []
        with counting(self._model.device.type) as counter:

            def count(index: int) -> None:
                if index == 2:
                    counter.start()
                elif index == 2 + STEPS:
                    found.append(counter.stop())

            self._generate(_Calls(count))
        return found[0].per_step()

    def close(self) -> None:
        if self._mode.compiled:
            torch.compiler.reset()  # what was compiled holds the weights, and its graphs memory of their own

    @memory_for("a buffer of transformers")
    @torch.inference_mode()
    def _generate(self, each_token: _Calls) -> torch.Tensor:
        """One run, from the prompts as lists: new tokens [B,N]."""
        from transformers import LogitsProcessorList

        ids, attended = left_padded(self._rows, self._model.device)
        self._model.set_attn_implementation(self._mode.attention)
        out = self._model.generate(
            ids,
            attention_mask=attended,
            max_new_tokens=self._num_tokens,
            min_new_tokens=self._num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([each_token]),
            **self._mode.options(),
        )
        return out[:, ids.shape[1] :]


class _Calls:
    """A logits processor that changes nothing and calls `note(index)` once for each token, from 0."""

    def __init__(self, note: Callable[[int], object]) -> None:
        self._note, self._index = note, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._note(self._index)
        self._index += 1
        return scores


@memory_for("the copy of the weights that transformers runs")
def to_hf(network: Decoder | Encoder) -> Any:
    """A language model of transformers with copies of the same weights, on the same device; of an encoder its body."""
    kind, config = _hf_kind(network)
    with torch.device(network.device):
        model = kind._from_config(config, dtype=network.dtype, attn_implementation="sdpa").eval()
    if isinstance(network, Decoder):
        model.load_state_dict(state_of(network) | {HEAD: network.head.weight})  # a tied head is there twice
        return model
    missing, unknown = model.load_state_dict(state_of(network), strict=False)
    body = dict(model.base_model.named_parameters())
    _check_same("encoder", [*unknown, *(name for name in missing if name in body and "pooler" not in name)])
    return model.base_model


def _hf_kind(network: Any) -> tuple[Any, Any]:
    """The class of transformers that a network is of, and its config."""
    import transformers

    told = settings_of(network.config)
    return getattr(transformers, told["architectures"][0]), transformers.AutoConfig.for_model(**told)


def _check_same(what: str, names: Sequence[str]) -> None:
    """ModelError where a model of transformers has other weights than ours."""
    if names:
        raise ModelError(f"transformers has no such {what}: {', '.join(names)} are in one of both only.")


PEERS: dict[str, Mode | type[TorchGraphs]] = {each.name: each for each in (*MODES, TorchGraphs, TorchCompile)}


def make(
    names: Sequence[str], model: Decoder, rows: Sequence[Sequence[int]], settings: Settings
) -> tuple[list[Peer], dict[str, str]]:
    """The peers of those names, and why others could not be made.

    The modes of transformers share one copy of the weights, for which there may be no memory.
    """
    made: list[Peer] = []
    absent: dict[str, str] = {}
    hf = None
    for name in names:
        kind = PEERS[name]
        try:
            if isinstance(kind, Mode):
                hf = hf or to_hf(model)
                made.append(HuggingFace(kind, hf, rows, settings))
            else:
                made.append(kind(model, rows, settings))
        except OutOfMemory as error:
            absent[name] = first_line(error)
    return made, absent


class TrainMode(NamedTuple):
    """How transformers trains: by which attention, with PyTorch's fused AdamW or not, compiled by which mode."""

    attention: str = "sdpa"
    fused: bool = True
    mode: str | None = None
    liger: bool = False


TRAIN_MODES = {
    "hf-eager": TrainMode("eager", fused=False),
    "hf-sdpa": TrainMode(),
    "hf-liger": TrainMode(liger=True),
    "hf-compile": TrainMode(mode="default"),
    "hf-reduce-overhead": TrainMode(mode="reduce-overhead"),
    "hf-max-autotune": TrainMode(mode="max-autotune"),
}
"""transformers: plain; with SDPA and PyTorch's fused AdamW; and compiled, or with Liger's kernels, besides. In 16 bits
by autocast.
"""
CAPTURED_BY = 3
"""Steps after which all memory is there that later ones need: graphs are captured in one of them."""
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


def norm_of(grads: Any) -> float:
    """The norm of all gradients."""
    return float(torch.stack([grad.float().norm() for grad in grads]).norm())


@memory_for("what transformers trains")
def train_with_hf(network: Any, name: str, examples: Sequence[Example], dropout: float) -> Sized:
    """transformers' model with the same weights in fp32, which autocast multiplies in the model's own dtype.

    Compiled are its forward and its backward pass, for this batch's shape alone.
    """
    how, device = TRAIN_MODES[name], network.device
    if how.mode in GRAPHS and device.type != "cuda":
        raise LeftOut(f"{how.mode} needs an NVIDIA GPU")
    before = allocated(device.type)
    model = _to_hf_in_training(network, dropout, attn_implementation=how.attention)
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
    for _ in range(CAPTURED_BY):
        step()
    held, remark = allocated(device.type) - before, _in_parts(name) if how.mode else ""
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
    if why := no_liger(model.device.type):
        raise LeftOut(why)
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


def _to_hf_in_training(network: Any, dropout: float, **how: Any) -> Any:
    kind, config = _hf_kind(network)
    for name in [name for name in vars(config) if "drop" in name and isinstance(getattr(config, name), float)]:
        setattr(config, name, dropout)
    state = {name: tensor.to(torch.float32, copy=True) for name, tensor in state_of(network).items()}
    # It knows checkpoints' names of weights, which are not those of a live model in all versions.
    model, loading = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True, **how
    )
    _check_same("model", [*loading["missing_keys"], *loading["unexpected_keys"]])
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
