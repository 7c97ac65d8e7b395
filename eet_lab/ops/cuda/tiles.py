"""The shared memory of kernels whose warps share stages of up to 16 outputs, as csrc/eet/linear_tiles.cuh plans it.

T tokens, C channels.
"""

from __future__ import annotations

from eet_lab.ops.cuda.launching import odd_stride
from eet_lab.ops.fits import FEW

__all__ = ["FEW", "OUTPUTS", "fits"]

OUTPUTS = 16  # of a stage, at most
STAGE_ROW_BYTES = 2048  # weights of an output, at most, in a stage
CHUNK, INT8_CHUNK = 32, 64  # inputs that a warp multiplies at a time; int8_linear pads activations to whole ones
BARRIER_BYTES = 16  # of a stage
RESERVED_BYTES = 1024  # that every block leaves


def fits(
    T: int,
    C: int,
    itemsize: int,
    *,
    normed: bool,
    stages: int,
    shared_bytes: int,
    outputs: int = OUTPUTS,
    int8_weights: bool = False,
) -> bool:
    """Whether T tokens, a norm's weights and so many stages do, in blocks of `outputs` that can have `shared_bytes`.

    `itemsize` is of the activations, and of the weights unless those are int8.
    """
    if int8_weights:
        weight_itemsize, chunk, row_bytes = 1, INT8_CHUNK, -(-C // INT8_CHUNK) * INT8_CHUNK * itemsize + 16
    else:
        weight_itemsize, chunk, row_bytes = itemsize, CHUNK, odd_stride(C * itemsize)
    inputs = -(-C // -(-C * weight_itemsize // STAGE_ROW_BYTES))  # of a stage, before they are whole chunks
    stage_bytes = min(OUTPUTS, outputs) * odd_stride(-(-inputs // chunk) * chunk * weight_itemsize) + BARRIER_BYTES
    norm_bytes = 2 * C * itemsize * normed
    sums_bytes = 4096 if T <= 8 else 512  # of a token; of up to four half of that in most kernels
    return T * (row_bytes + sums_bytes) + norm_bytes + stages * stage_bytes + RESERVED_BYTES <= shared_bytes
