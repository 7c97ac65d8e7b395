"""Out of memory, foreseen: what a run will need, told from rehearsals before any of it is allocated."""

from __future__ import annotations

from dataclasses import dataclass

MiB = 2**20


@dataclass(frozen=True)
class Forecast:
    """The memory of a run at its peak, by purpose, beside what there is. All sizes are bytes.

    `activation_bytes` is the arena, or what fresh tensors take at once; `growth_bytes` the copy beside a KV cache that
    grows; `workspace_bytes` what libraries keep for themselves. `free_bytes` is what the device has for all of this,
    the weights included. `largest_batch` is how many rows of this shape would fit, and `largest_context` how many
    columns (prompt and new tokens) for this many rows, at most the model's context; 0: none.
    """

    num_rows: int
    prompt_tokens: int  # of the longest prompt
    new_tokens: int
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    growth_bytes: int
    workspace_bytes: int
    free_bytes: int
    largest_batch: int
    largest_context: int

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return self.weight_bytes + self.run_bytes

    @property
    def run_bytes(self) -> int:
        """What the run adds to the weights."""
        return self.kv_bytes + self.activation_bytes + self.growth_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.free_bytes

    @property
    def parts(self) -> dict[str, int]:
        """The peak by purpose, what is nothing left out."""
        named = {
            "weights": self.weight_bytes,
            "KV cache": self.kv_bytes,
            "its growth": self.growth_bytes,
            "activations": self.activation_bytes,
            "workspace": self.workspace_bytes,
        }
        return {name: num_bytes for name, num_bytes in named.items() if num_bytes}

    def __str__(self) -> str:
        rows = f"{self.num_rows} row{'s' * (self.num_rows != 1)}"
        shape = f"{rows} of {self.prompt_tokens} + {self.new_tokens} tokens"
        verdict = "fits" if self.fits else "does not fit"
        parts = ", ".join(f"{name} {num_bytes / MiB:,.1f}" for name, num_bytes in self.parts.items())
        return (
            f"{shape}: {verdict}. {self.total_bytes / MiB:,.1f} of {self.free_bytes / MiB:,.1f} MiB ({parts}). "
            f"Would fit: {self.largest_batch:,} rows of this shape, or {self.largest_context:,} columns for {rows}."
        )
