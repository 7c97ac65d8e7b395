"""Log-probabilities of what is generated, beside the tokens: computed in the step, and brought to the host with them.

They are the log-softmax in fp32 of the raw logits, before temperature, top-k and top-p, as vLLM's are. B slots,
C channels, V vocabulary, K entries of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eet_lab.engine.settings import MOST_LOGPROBS
from eet_lab.models.decoder import Decoder
from eet_lab.ops.reference import newest_logits
from eet_lab.ops.types import Batch, TokenBuffer, fresh
from eet_lab.parts.batches import LOGGED
from eet_lab.scheduling import TokenLogprobs

FLOAT, WIDE = torch.float32.itemsize, torch.float64.itemsize


class LogprobLog:
    """What each of the last passes told of its tokens, on the device; a slot's row is read by `of`.

    A row is the chosen token's log-probability, the K largest, and the ids of these, as fp64, which holds fp32 and ids
    exactly: one copy brings all of it. The log lies where it is for as long as its slots, so that captured steps may
    write it.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._top = _most(vocab_size)
        shape = LOGGED, num_slots, 1 + 2 * self._top
        self.rows = torch.zeros(shape, dtype=torch.float64, device=device)  # pass i in [i % LOGGED]

    @staticmethod
    def num_bytes(num_slots: int, model: Decoder) -> tuple[int, int]:
        """What a log of so many slots holds, and at most what `write` takes beside it."""
        row = (1 + 2 * _most(model.config.vocab_size)) * WIDE
        # The logits in fp32 and their exponentials are more than the logits in both types; then the row and its parts.
        written = 2 * model.config.vocab_size * FLOAT + 2 * model.config.hidden_size * model.dtype.itemsize + 2 * row
        return LOGGED * num_slots * row, num_slots * written

    def write(self, model: Decoder, norm_linear: Callable, hidden: Tensor, batch: Batch, buffer: TokenBuffer) -> None:
        """The row of the pass that `buffer` has just moved on by, of its hidden states [T,C].

        The logits are computed for this alone, and the tokens are chosen without them: fused sampling writes none, and
        a request gets the same tokens whoever wants log-probabilities beside it. So a pass with such a request reads
        the head's weights once more. Its memory is no part of a plan: `num_bytes` tells how much that is.
        """
        logits = newest_logits(hidden, batch, model.norm, model.head, empty=fresh, norm_linear=norm_linear).float()
        total = logits.logsumexp(-1, keepdim=True)
        top = logits.topk(self._top)
        chosen = logits.gather(-1, buffer.ids[:, None]) - total
        row = torch.cat([chosen.double(), top.values - total, top.indices], -1)
        self.rows[:, : len(row)].index_copy_(0, (buffer.num_passes - 1) % LOGGED, row[None])

    def of(self, row: list[float], count: int) -> TokenLogprobs:
        """What a slot's row tells, with the `count` likeliest tokens, as many as there are."""
        [chosen, *both], top = row, self._top
        likeliest = zip(map(int, both[top:]), both[:top], strict=True)
        return TokenLogprobs(chosen, tuple(likeliest)[:count])


def _most(vocab_size: int) -> int:
    return min(MOST_LOGPROBS, vocab_size)
