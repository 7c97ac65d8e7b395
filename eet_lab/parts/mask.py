"""How attention knows what a query may see. A mask part returns `attend(qkv, kv, step, spec, extras)` for one pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from eet_lab.ops import reference
from eet_lab.ops.pads import serves_any_pads
from eet_lab.ops.types import Empty, Spec, Step


@serves_any_pads
def dense_mask(ops: Any, step: Step, spec: Spec, like: Tensor, *, empty: Empty) -> Callable:
    """The baseline: an additive mask [B,1,Q,K], built and added in every step."""
    return partial(ops.masked_attention, mask=reference.dense_mask(step, spec, like, empty=empty))


@serves_any_pads
def no_mask(ops: Any, step: Step, spec: Spec, like: Tensor, *, empty: Empty) -> Callable:
    """`num_pad` and the query's own column bound the keys; nothing is built, and pads are never read."""
    return ops.attention
