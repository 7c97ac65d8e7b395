"""Which kernel streams a product of few tokens, and what its launcher is told. T tokens, C channels, N outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from eet_lab.errors import KernelError
from eet_lab.ops.cuda import plan
from eet_lab.ops.cuda.launching import REMEDY, Limits
from eet_lab.ops.cuda.plan import Attempt, Product
from eet_lab.ops.fits import FEW

# Which kernel takes a product was measured by size in 16 bits on an H200, beside cuBLAS (benchmarks/kernel_choice.py)
# and in chains of a layer's products (LOG). Other GPUs and fp32 follow the same rule, but that they have no tiles.
MOST_INPUTS, MOST_NORMED = 48 * 1024, 12 * 1024  # inputs of an output; with more, or a norm of more, cuBLAS is ahead
MOST_NORMED_FROM_NINE = 3584  # the same of a norm, from nine tokens on, without tiles: cuBLAS is ahead at 4,096
CUBLAS_OUTPUTS = 8  # cuBLAS takes up to three times as long if the outputs are no multiple (rows of n50257)
FEW_IN_TILES = 9  # tokens from which on wgmma_linear takes products in 16 bits, but for those with gates and heads
MOST_VECTOR_TOKENS = 4  # of vector_linear, in 16 bits
LINEAR_BLOCK_BYTES = range(280 << 10, 3 << 20)  # weights of a block, of products with a norm: linear is ahead of it
MOST_REGISTER_TOKENS = 8  # of register_linear, in 16 bits
FEWEST_IN_REGISTERS = 4  # tokens from which on it is ahead; fewer only without a norm, with so many activations:
WIDE_ACTIVATIONS = 20 * 1024
REGISTER_OUTPUTS = 64  # outputs of a block that it takes, at most
REGISTER_CHANNELS = 1792  # of a norm that it takes, at most
# From so many tokens and activations on, two blocks of register_linear divide the inputs of their outputs (split-K).
# With fewer it loses, or was not measured (LOG).
FEWEST_DIVIDED, DIVIDED_ACTIVATIONS = 6, 48 * 1024
LEAST_RING = 28 * 1024  # bytes of vector_linear's ring, if not all: about what a stage of linear is
INT8_CHANNELS = 16  # their multiples: an output's weights are copied 16 bytes at a time


def product_of(
    T: int,
    N: int,
    C: int,
    itemsize: int,
    on: Limits,
    *,
    normed: bool = False,
    residual: bool = False,
    gated: bool = False,
) -> Product:
    """The sizes on a GPU: a block a multiprocessor, but none without outputs. No tokens are planned as one."""
    num_blocks = max(1, min(N // 2 if gated else N, on.num_blocks))
    return Product(max(1, T), N, C, itemsize, num_blocks, normed, residual, gated)


# These are asked for at every launch, so their arguments are numbers: a record would be made and hashed each time.


@cache
def streaming_kernel(
    T: int, N: int, C: int, itemsize: int, normed: bool, gathered: bool, gated: bool, on: Limits
) -> str | None:
    """The kernel that streams the weights of such a product, none of them int8; None: no kernel does.

    `gathered`: rows that lie apart, which are a head's. `gated`: N/2 gates and N/2 outputs that they let through, side
    by side.
    """
    is_half, product = itemsize == 2, product_of(T, N, C, itemsize, on, normed=normed, gated=gated)
    if T > FEW or (gated and (N % 2 or not is_half)):
        return None
    if is_half and on.is_hopper and T >= FEW_IN_TILES and not gated and not gathered:
        return None
    if _most_inputs(T, normed, gathered) >= C:
        if is_half and not gathered and not gated and _suits_registers(T, product.outputs, C, normed):
            return "register_linear"
        takes_vector = is_half and T <= MOST_VECTOR_TOKENS
        prefers_linear = not takes_vector or (normed and product.outputs * C * itemsize in LINEAR_BLOCK_BYTES)
        # With one stage nothing is on its way while that is multiplied; vector_linear cuts its stages smaller.
        if prefers_linear and _holds(plan.tiles(product, on.shared_bytes), stages=2):
            return "linear"
        if takes_vector and _holds(plan.vector(product, on.shared_bytes), num_bytes=LEAST_RING):
            return "vector_linear"
    if N % CUBLAS_OUTPUTS and plan.tiles(product, on.shared_bytes):
        return "linear"
    return None


def _holds(found: Attempt | None, stages: int = 0, num_bytes: int = 0) -> bool:
    """Whether there is a plan, and its ring holds so much, or all."""
    if found is None:
        return False
    ring = found[1]
    holds_all = ring.num_stages >= ring.needed
    return holds_all or (ring.num_stages >= stages and ring.num_stages * ring.stage_bytes >= num_bytes)


def _most_inputs(T: int, normed: bool, gathered: bool) -> int:
    """Of an output; with more, cuBLAS takes the product. Rows that lie apart are a head's, which chooses as it ends."""
    if not normed:
        return MOST_INPUTS
    return MOST_NORMED if T <= 8 or gathered else MOST_NORMED_FROM_NINE


def _suits_registers(T: int, outputs: int, C: int, normed: bool) -> bool:
    """Whether a product in 16 bits, of so many outputs of a block, is register_linear's."""
    if T > MOST_REGISTER_TOKENS or outputs > REGISTER_OUTPUTS or (normed and C > REGISTER_CHANNELS):
        return False
    return T >= FEWEST_IN_REGISTERS or (not normed and T * C >= WIDE_ACTIVATIONS)


@cache
def takes_int8(T: int, N: int, C: int, itemsize: int, normed: bool, scales: int, on: Limits) -> bool:
    """Whether int8_linear takes a product whose int8 weights have so many scales an output.

    With one stage in its ring too: to expand the weights for cuBLAS moves five times as many bytes.
    """
    if T > FEW or C % INT8_CHANNELS:
        return False
    product = product_of(T, N, C, itemsize, on, normed=normed)
    return plan.tiles(product, on.shared_bytes, int8=True, grouped=scales > 1) is not None


@cache
def streamed(
    T: int,
    N: int,
    C: int,
    itemsize: int,
    normed: bool,
    gathered: bool,
    gated: bool,
    residual: bool,
    scales: int,
    on: Limits,
    kernel: str | None = None,
) -> tuple[str, dict[str, int]]:
    """The kernel that streams a product, and what its launcher is told of sizes and of shared memory.

    `scales` of an output, if its weights are int8; else 0. `kernel`: this one, whichever suits the product.
    """
    if kernel is None:
        plain = streaming_kernel(T, N, C, itemsize, normed, gathered, gated, on) or "linear"
        kernel = "int8_linear" if scales else plain
    product = product_of(T, N, C, itemsize, on, normed=normed, residual=residual, gated=gated)
    sizes = {"T": T, "N": N, "K": C, "num_blocks": product.num_blocks}
    if kernel == "register_linear":
        return kernel, sizes | _in_registers(product, on)
    if kernel in ("linear", "vector_linear"):
        sizes["gated"] = gated
    return kernel, sizes | _planned(kernel, product, on, scales)


def _in_registers(product: Product, on: Limits) -> dict[str, int]:
    """What register_linear is told beside the sizes."""
    pairs = product._replace(num_blocks=product.num_blocks // 2)
    many = product.T >= FEWEST_DIVIDED and product.T * product.K >= DIVIDED_ACTIVATIONS
    halves = product.K % 16 == 0 and product.num_blocks % 2 == 0
    divided = on.is_hopper and many and halves and not product.normed and pairs.outputs <= REGISTER_OUTPUTS
    its_own = pairs if divided else product
    found, ring = _taken("register_linear", product, on, plan.register(its_own, on.shared_bytes, divided))
    at_once = plan.at_once(ring, is_paced=on.is_hopper and _is_paced(product, on))
    return {"num_blocks": its_own.num_blocks, "divided": divided, "at_once": at_once} | found._asdict()


def _is_paced(product: Product, on: Limits) -> bool:
    """Whether it is of a layer whose wide products are all register_linear's, the FFN's second one divided.

    Measured with GPT-2 XL, which gains; models of which one such product is another kernel's, or is not divided, lose
    (LOG). What the rest of the layer is like is guessed: its FFN has four times the channels, and no gate.
    """
    channels = product.K if product.normed else product.N
    is_divided = product.T >= FEWEST_DIVIDED and product.T * 4 * channels >= DIVIDED_ACTIVATIONS
    in_registers = channels <= REGISTER_CHANNELS and plan.ceil(4 * channels, on.num_blocks) <= REGISTER_OUTPUTS
    return is_divided and in_registers and (product.normed or 4 * channels == product.K)


def tiled(T: int, N: int, C: int, residual: bool, most_clusters: tuple[int, ...], on: Limits) -> dict[str, int]:
    """The same for wgmma_linear, of whose clusters so many run at once."""
    product = Product(T, N, C, 2, 1, residual=residual)
    return {"T": T, "N": N, "K": C} | _planned("wgmma_linear", product, on, most_clusters)


def _planned(kernel: str, product: Product, on: Limits, more: Any = None) -> dict[str, int]:
    """Its plan, by the launcher's names. `more`: scales of an output, or clusters that run at once."""
    makes: dict[str, Callable[[], Attempt | None]] = {
        "linear": lambda: plan.tiles(product, on.shared_bytes),
        "int8_linear": lambda: plan.tiles(product, on.shared_bytes, int8=True, grouped=more > 1),
        "vector_linear": lambda: plan.vector(product, on.shared_bytes),
        "wgmma_linear": lambda: plan.clusters(product, on.shared_bytes, more),
    }
    found, _ = _taken(kernel, product, on, makes[kernel]())
    stride = {"stride": product.stride} if kernel == "vector_linear" else {}
    return found._asdict() | stride


def _taken(kernel: str, product: Product, on: Limits, found: Attempt | None) -> Attempt:
    """What was found; KernelError where that is nothing."""
    if found is None:
        raise KernelError(
            f"{kernel} takes no {product.T} tokens of {product.K:,} channels in the {on.shared_bytes:,} bytes of "
            f"shared memory that a block can have here. {REMEDY}"
        )
    return found
