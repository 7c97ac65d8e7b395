"""The shape of a GPT-2 decoder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a decoder; `context` is the longest sequence in tokens."""

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    context: int
    act: str = "gelu_tanh"
    eps: float = 1e-5
    bos_id: int = 0
    eos_id: int | None = None
    tied_head: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_params(self) -> int:
        """Parameters, with tied embeddings counted once."""
        C, F = self.hidden_size, self.ffn_size
        layer = 4 * C * C + 4 * C + 2 * C * F + F + C + 4 * C
        embeddings = (self.vocab_size * (1 if self.tied_head else 2) + self.context) * C
        return self.num_layers * layer + embeddings + 2 * C

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes that one token adds to the KV cache."""
        return 2 * self.num_layers * self.hidden_size * element_bytes


PRESETS = {
    "gpt2": Config(12, 768, 12, 3072, 50257, 1024, bos_id=50256, eos_id=50256),
    "gpt2-medium": Config(24, 1024, 16, 4096, 50257, 1024, bos_id=50256, eos_id=50256),
    "gpt2-xl": Config(48, 1600, 25, 6400, 50257, 1024, bos_id=50256, eos_id=50256),
    "l16-h1024": Config(16, 1024, 16, 4096, 50257, 1024, bos_id=50256, eos_id=50256),
    "l24-h2048": Config(24, 2048, 16, 8192, 50257, 1024, bos_id=50256, eos_id=50256),
}
"""True sizes with random weights: for timing, their text means nothing."""
