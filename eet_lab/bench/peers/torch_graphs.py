"""GPT-2 as a PyTorch user writes it to be captured: a KV cache of fixed length, SDPA, a decode step in a CUDA graph.

B rows, Q queries a row, S columns of the cache, C channels, H heads, D head dim, V words.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from eet_lab.bench.launches import STEPS, StepLaunches, counting
from eet_lab.bench.peers.peer import Clock, Peer, Rows, Timing, left_padded
from eet_lab.engine.settings import Settings
from eet_lab.models.config import Config
from eet_lab.models.decoder import Decoder
from eet_lab.ops.oom import memory_for

ACTS = {"gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "gelu": F.gelu, "relu": F.relu}
ALIGNED = 64
"""Columns of the cache are a multiple of it, so that SDPA need not copy the mask."""


class StaticGPT2:
    """One left-padded batch: its KV cache, and a greedy decoder over PyTorch's own functions.

    A step reads its token and its column from the device and writes both, so a capture of it can be replayed.
    """

    def __init__(self, model: Decoder, rows: Rows, new_tokens: int) -> None:
        self.model, config, lengths = model, model.config, [len(row) for row in rows]
        B, self.width = len(rows), max(lengths)
        self.ids = torch.zeros(B, self.width, dtype=torch.long, device=model.device)
        self.num_pad = torch.zeros(B, 1, dtype=torch.long, device=model.device)
        self.ragged = min(lengths) < self.width
        self.receive(rows)
        self.capacity = -(-(self.width + new_tokens) // ALIGNED) * ALIGNED
        shape = (len(model.layers), 2, B, config.num_heads, self.capacity, config.head_dim)
        self.cache = model.words.new_zeros(shape)
        self.token = torch.zeros(B, 1, dtype=torch.long, device=model.device)
        self.column = torch.zeros(1, dtype=torch.long, device=model.device)
        self.tokens = torch.zeros(B, self.capacity, dtype=torch.long, device=model.device)

    def receive(self, rows: Rows) -> None:
        """Send prompts of the same lengths to the device, where a captured step expects them."""
        ids, attended = left_padded(rows, self.ids.device)
        self.ids.copy_(ids)
        self.num_pad.copy_(self.width - attended.sum(1, keepdim=True))

    def prefill(self) -> None:
        """Read the prompts and choose each row's first token."""
        self.column.fill_(self.width - 1)
        columns = torch.arange(self.width, device=self.ids.device)
        # Rows of one length need no mask: SDPA then takes its fastest kernel.
        self._keep(self._forward(self.ids, columns, self.width, causal=not self.ragged))

    def step(self) -> None:
        """One more token for every row."""
        self.column.add_(1)
        self._keep(self._forward(self.token, self.column, self.capacity, causal=False))

    def _keep(self, token: Tensor) -> None:
        self.token.copy_(token)
        self.tokens.index_copy_(1, self.column, token)

    def _forward(self, ids: Tensor, columns: Tensor, extent: int, causal: bool) -> Tensor:
        """Ids [B,Q] in `columns` [Q], keys of columns [0, extent): the greedy choice after the last, [B,1]."""
        model, (B, Q), D = self.model, ids.shape, self.model.config.head_dim
        mask = None if causal else self._mask(columns, extent)
        positions = (columns - self.num_pad).clamp(min=0)
        x = F.embedding(ids, model.words)
        if model.places is not None:
            x = x + F.embedding(positions, model.places)
        for w, (keys, values) in zip(model.layers, self.cache, strict=True):
            qkv = F.linear(_norm(x, w.norm_1), w.qkv.weight, w.qkv.bias)
            q, k, v = qkv.view(B, Q, 3, -1, D).permute(2, 0, 3, 1, 4)
            keys.index_copy_(2, columns, k)
            values.index_copy_(2, columns, v)
            mixed = F.scaled_dot_product_attention(q, keys[:, :, :extent], values[:, :, :extent], mask, 0.0, causal)
            x = x + F.linear(mixed.transpose(1, 2).reshape(B, Q, -1), w.proj.weight, w.proj.bias)
            h = ACTS[model.config.act](F.linear(_norm(x, w.norm_2), w.fc_1.weight, w.fc_1.bias))
            x = x + F.linear(h, w.fc_2.weight, w.fc_2.bias)
        return F.linear(_norm(x[:, -1:], model.norm), model.head.weight).argmax(-1)

    def _mask(self, columns: Tensor, extent: int) -> Tensor:
        """What each query may see, [B,1,Q,extent]. A pad sees itself, since a softmax over nothing is NaN."""
        key, query = torch.arange(extent, device=columns.device), columns[:, None]
        return ((key <= query) & (key >= self.num_pad[:, :, None]) | (key == query))[:, None]


class TorchGraphs(Peer):
    """`StaticGPT2` with its step captured. Source: gpt-fast's way of decoding, with graphs by hand, uncompiled."""

    name = "torch-cuda-graphs"

    def __init__(self, model: Decoder, rows: Rows, settings: Settings) -> None:
        super().__init__(model.device, model.weight_bytes)
        self._model, self._rows, self._num_tokens = model, rows, settings.max_new_tokens
        self._batch: StaticGPT2 | None = None
        self._graph = torch.cuda.CUDAGraph()

    @staticmethod
    def unavailable(device: str, config: Config | None = None) -> str | None:
        """Why it cannot run on that device, or such a model, or None."""
        if config is not None and config.family != "gpt2":
            return f"it is written for GPT-2, and this is {config.family}"
        return None if device == "cuda" else "CUDA graphs need an NVIDIA GPU"

    @memory_for("the KV cache of plain PyTorch")
    @torch.inference_mode()
    def _warm_up(self) -> Timing:
        self._batch = batch = StaticGPT2(self._model, self._rows, self._num_tokens)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # libraries make their workspaces at the first call, which can't be captured
            batch.prefill()
            batch.step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph):
            batch.step()
        return self.time()

    @memory_for("the prefill of plain PyTorch")
    @torch.inference_mode()
    def time(self) -> Timing:
        batch = self._captured()
        clock = Clock(self._device)
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
            found = counter.stop()
        return StepLaunches(*(number / STEPS for number in found)) if all(found) else None

    def close(self) -> None:
        self._batch = None
        self._graph.reset()

    def _captured(self) -> StaticGPT2:
        if self._batch is None:
            raise RuntimeError("call prepare() first: it captures the step")
        return self._batch


def _norm(x: Tensor, w: tuple) -> Tensor:
    weight, bias, eps = w
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
