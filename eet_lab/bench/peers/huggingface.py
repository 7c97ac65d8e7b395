"""Hugging Face transformers' `generate`, left-padded and greedy, in one of its modes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Any

import torch

from eet_lab.bench.launches import STEPS, StepLaunches, counting
from eet_lab.bench.peers.peer import Peer, Rows, Timing, left_padded
from eet_lab.bench.timing import Stopwatch
from eet_lab.engine.settings import Settings
from eet_lab.errors import ModelError
from eet_lab.models.config import Config
from eet_lab.models.decoder import Decoder
from eet_lab.models.encoder import Encoder
from eet_lab.models.families import settings_of
from eet_lab.models.weights import HEAD, state_of
from eet_lab.ops.oom import memory_for


@dataclass(frozen=True)
class Mode:
    """How transformers attends; with `compiled`, a mode of torch.compile, its KV cache is static and a step compiled.

    "reduce-overhead" is what transformers chooses by itself for a static cache, "max-autotune" the best that it
    offers (`CompileConfig`): CUDA graphs, and every matrix product tried in several ways.
    """

    name: str
    attention: str
    compiled: str | None = None

    def unavailable(self, device: str, config: Config | None = None) -> str | None:
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
def to_hf(decoder: Decoder) -> Any:
    """A causal language model of transformers with copies of the same weights, on the same device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    told = settings_of(decoder.config)
    with torch.device(decoder.device):
        config = AutoConfig.for_model(told.pop("model_type"), **told)
        model = AutoModelForCausalLM.from_config(config, dtype=decoder.dtype).eval()
    model.load_state_dict(state_of(decoder) | {HEAD: decoder.head.weight})  # a tied head is there twice
    return model


@memory_for("the copy of the weights that transformers runs")
def encoder_to_hf(encoder: Encoder) -> Any:
    """The body of an encoder of transformers with copies of the same weights, on the same device."""
    import transformers

    told = settings_of(encoder.config)
    config = transformers.AutoConfig.for_model(told.pop("model_type"), **told)
    with torch.device(encoder.device):
        kind = getattr(transformers, told["architectures"][0])
        model = kind._from_config(config, dtype=encoder.dtype, attn_implementation="sdpa").eval()
    missing, unknown = model.load_state_dict(state_of(encoder), strict=False)
    body = dict(model.base_model.named_parameters())
    untold = [name for name in missing if name in body and "pooler" not in name]
    if unknown or untold:
        raise ModelError(f"transformers has no such encoder: {', '.join([*unknown, *untold])} are in one of both only.")
    return model.base_model
