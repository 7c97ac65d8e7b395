"""Peers: what the user would run otherwise, with the same weights and prompts.

Each is Hugging Face transformers' `generate`, left-padded and greedy, in one of its modes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from eet_lab.engine.settings import Settings
from eet_lab.models.config import Config
from eet_lab.models.decoder import Decoder
from eet_lab.ops.oom import memory_for

HF_ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}


class Timing(NamedTuple):
    """One run: time to the first token of all rows, per token after it (None for a single token), and end to end."""

    ttft_ms: float
    tpot_ms: float | None
    total_ms: float
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Mode:
    """How transformers attends, and whether its KV cache is static and its decode step compiled."""

    name: str
    attention: str
    static: bool = False

    def unavailable(self, device: str) -> str | None:
        """Why it cannot run on that device, or None."""
        if self.static and device != "cuda":
            return "transformers compiles generate on a GPU only"
        return None


PEERS = {
    mode.name: mode
    for mode in (Mode("hf-eager", "eager"), Mode("hf-sdpa", "sdpa"), Mode("hf-static-compile", "sdpa", static=True))
}


class Peer:
    """One mode of transformers on one workload. `model` is what `to_hf` made; several peers may share it."""

    def __init__(self, mode: Mode, model: Any, rows: Sequence[Sequence[int]], settings: Settings) -> None:
        self.name, self.recipe, self._mode, self._model = mode.name, "", mode, model
        self._num_tokens = settings.max_new_tokens
        self._ids, self._attended = _left_padded(rows, model.device)
        self.peak_bytes: int | None = None

    def prepare(self) -> None:
        """Compile and warm up, in the shapes that will be timed."""
        on_gpu = self._model.device.type == "cuda"
        if on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            others = torch.cuda.memory_allocated() - self._model.get_memory_footprint()
        for _ in range(3 if self._mode.static else 1):  # compiled: compile, then record the graphs, then replay them
            self.time()
        if on_gpu:
            self.peak_bytes = int(torch.cuda.max_memory_allocated() - others)

    @memory_for("a buffer of transformers")
    @torch.inference_mode()
    def time(self) -> Timing:
        """One run."""
        from transformers import LogitsProcessorList

        self._model.set_attn_implementation(self._mode.attention)
        static = {"cache_implementation": "static"} if self._mode.static else {}
        clock = _Clock(self._model.device)
        out = self._model.generate(
            self._ids,
            attention_mask=self._attended,
            max_new_tokens=self._num_tokens,
            min_new_tokens=self._num_tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([clock]),
            **static,
        )
        clock.mark()
        *token_ms, total_ms = clock.read_ms()
        steps = self._num_tokens - 1
        tokens = tuple(map(tuple, out[:, self._ids.shape[1] :].tolist()))
        tpot_ms = (token_ms[-1] - token_ms[0]) / steps if steps else None
        return Timing(token_ms[0], tpot_ms, total_ms, tokens)


class _Clock:
    """A logits processor that changes nothing and notes when it was called: once for each token, without waiting."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.mark()
        return scores

    def mark(self) -> None:
        """Note the time."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def read_ms(self) -> list[float]:
        """Milliseconds from the first mark to each later one."""
        start, *marks = self._marks
        if not self._on_gpu:
            return [(mark - start) * 1e3 for mark in marks]
        torch.cuda.synchronize()
        return [start.elapsed_time(mark) for mark in marks]


@memory_for("the copy of the weights that transformers runs")
def to_hf(decoder: Decoder) -> Any:
    """A `GPT2LMHeadModel` with copies of the same weights, on the same device."""
    from transformers import GPT2LMHeadModel

    with torch.device(decoder.device):
        model = GPT2LMHeadModel(_hf_config(decoder.config)).to(decoder.dtype).eval()
    state: dict[str, Any] = {"transformer.wte.weight": decoder.words, "transformer.wpe.weight": decoder.places}
    names = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for i, layer in enumerate(decoder.layers):
        parts: Any = layer
        for name, part in zip(names, parts, strict=True):
            weight = part.weight if name.startswith("ln") else part.weight.t()  # transformers keeps [in, out]
            state |= {f"transformer.h.{i}.{name}.weight": weight, f"transformer.h.{i}.{name}.bias": part.bias}
    state |= {"transformer.ln_f.weight": decoder.norm.weight, "transformer.ln_f.bias": decoder.norm.bias}
    state |= {"lm_head.weight": decoder.head.weight}
    model.load_state_dict(state)
    return model


def _hf_config(config: Config) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.context,
        n_embd=config.hidden_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_inner=config.ffn_size,
        activation_function=HF_ACTIVATIONS[config.act],
        layer_norm_epsilon=config.eps,
        bos_token_id=config.bos_id,
        eos_token_id=config.eos_id,
        tie_word_embeddings=config.tied_head,
    )


def _left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B,S] and attention mask [B,S]."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    attended = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, attended
