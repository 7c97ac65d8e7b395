"""Peers: what the user would run otherwise, with the same weights and prompts; `training` has those who train.

They are the modes of transformers' `generate`, left-padded and greedy, and PyTorch's own functions (`static_decoder`).
`PEERS` names them all; each knows why it cannot run on a device. To add one: a `Peer`, and its line in `PEERS` and
`make`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eet_lab.bench.launches import STEPS, StepLaunches, counting
from eet_lab.bench.run_memory import collect, with_peak
from eet_lab.bench.static_decoder import Rows, StaticDecoder, compiled, left_padded
from eet_lab.bench.timing import Stopwatch
from eet_lab.engine.settings import Settings
from eet_lab.errors import ModelError, OutOfMemory, first_line
from eet_lab.models.decoder import Decoder
from eet_lab.models.encoder import Encoder
from eet_lab.models.families import settings_of
from eet_lab.models.table import HEAD
from eet_lab.models.weights import state_of
from eet_lab.ops.oom import memory_for


class Timing(NamedTuple):
    """One run: time to the first token of all rows, per token after it (None for a single token), and end to end.

    It begins with the prompts as lists of token ids, as ours does, and ends with the tokens on the host.
    """

    ttft_ms: float
    tpot_ms: float | None
    total_ms: float
    tokens: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, marks_ms: Sequence[float], tokens: torch.Tensor) -> Timing:
        """The timing from the times of the first token, perhaps others, the last token and the end; tokens [B,N]."""
        first_ms, last_ms, total_ms, steps = marks_ms[0], marks_ms[-2], marks_ms[-1], tokens.shape[1] - 1
        tpot_ms = (last_ms - first_ms) / steps if steps else None
        return cls(first_ms, tpot_ms, total_ms, tuple(map(tuple, tokens.tolist())))


class Peer(ABC):
    """Another way to run the same weights on the same prompts. `weight_bytes` are those that it reads from."""

    name: str

    def __init__(self, device: torch.device, weight_bytes: int) -> None:
        self.peak_bytes: int | None = None
        self._device, self.weight_bytes = device, weight_bytes

    def prepare(self) -> Timing:
        """Compile, capture and warm up in the shapes that will be timed; count the memory. The last run's timing."""
        collect(self._device.type)
        timing, peak = with_peak(self._warm_up, self._device.type)
        self.peak_bytes = None if peak is None else peak + self.weight_bytes
        return timing

    @abstractmethod
    def time(self) -> Timing:
        """One run."""

    @abstractmethod
    def launches(self) -> StepLaunches | None:
        """What one step launches; None where it cannot be counted."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds beside the weights."""

    @abstractmethod
    def _warm_up(self) -> Timing: ...


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
    kind, config = hf_kind(network)
    with torch.device(network.device):
        model = kind._from_config(config, dtype=network.dtype, attn_implementation="sdpa").eval()
    if isinstance(network, Decoder):
        model.load_state_dict(state_of(network) | {HEAD: network.head.weight})  # a tied head is there twice
        return model
    missing, unknown = model.load_state_dict(state_of(network), strict=False)
    body = dict(model.base_model.named_parameters())
    check_same("encoder", [*unknown, *(name for name in missing if name in body and "pooler" not in name)])
    return model.base_model


@contextmanager
def no_bar() -> Iterator[None]:
    """transformers shows no progress of its own, which would stand in ours."""
    logging = import_module("transformers.utils.logging")
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def hf_kind(network: Any) -> tuple[Any, Any]:
    """The class of transformers that a network is of, and its config."""
    import transformers

    told = settings_of(network.config)
    return getattr(transformers, told["architectures"][0]), transformers.AutoConfig.for_model(**told)


def right_padded(rows: Rows, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Ids [B,S], and which of them are real, [B,S]."""
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    lengths = torch.tensor([*map(len, rows)], device=device)
    return ids, torch.arange(longest, device=device) < lengths[:, None]


def check_same(what: str, names: Sequence[str]) -> None:
    """ModelError where a model of transformers has other weights than ours."""
    if names:
        raise ModelError(f"transformers has no such {what}: {', '.join(names)} are in one of both only.")


class TorchGraphs(Peer):
    """`StaticDecoder` with its step captured, as PyTorch runs it."""

    name = "torch-cuda-graphs"

    def __init__(self, model: Decoder, rows: Rows, settings: Settings) -> None:
        super().__init__(model.device, model.weight_bytes)
        self._model, self._rows, self._num_tokens = model, rows, settings.max_new_tokens
        self._batch: StaticDecoder | None = None
        self._graph = torch.cuda.CUDAGraph()

    @staticmethod
    def unavailable(device: str) -> str | None:
        """Why it cannot run on that device, or None."""
        return None if device == "cuda" else "CUDA graphs need an NVIDIA GPU"

    @memory_for("the KV cache of plain PyTorch")
    @torch.inference_mode()
    def _warm_up(self) -> Timing:
        self._batch = batch = StaticDecoder(self._model, self._rows, self._num_tokens)
        step = self._step_of(batch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries make their workspaces at the first call, which can't be captured
            batch.prefill()
            step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph):
            step()
        return self.time()

    @memory_for("the prefill of plain PyTorch")
    @torch.inference_mode()
    def time(self) -> Timing:
        batch = self._captured()
        clock = Stopwatch(self._device.type)
        batch.receive(self._rows)
        batch.prefill()
        clock.mark()
        for _ in range(self._num_tokens - 1):
            self._graph.replay()
        clock.mark()
        tokens = batch.tokens[:, batch.width - 1 :][:, : self._num_tokens].cpu()
        clock.mark()
        return Timing.of(clock.read_ms(), tokens)

    @torch.inference_mode()
    def launches(self) -> StepLaunches | None:
        """The mean of 8 replays; None for runs of fewer."""
        if self._num_tokens <= STEPS:
            return None
        self._captured().prefill()
        with counting("cuda") as counter:
            counter.start()
            for _ in range(STEPS):
                self._graph.replay()
            return counter.stop().per_step()

    def close(self) -> None:
        self._batch = None
        self._graph.reset()

    def _step_of(self, batch: StaticDecoder) -> Callable[[], None]:
        """What is captured."""
        return batch.step

    def _captured(self) -> StaticDecoder:
        if self._batch is None:
            raise RuntimeError("call prepare() first: it captures the step")
        return self._batch


class TorchCompile(TorchGraphs):
    """The same, its step compiled before it is captured: what gpt-fast measures."""

    name = "torch-compile"

    def close(self) -> None:
        super().close()
        torch.compiler.reset()  # what was compiled holds the weights

    def _step_of(self, batch: StaticDecoder) -> Callable[[], None]:
        return compiled(batch)


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
