"""How a launch that streams weights divides its block's shared memory: its ring of stages, and what lies beside that.

Launchers get these numbers by keyword, and refuse those that do not agree with what their kernels have to hold.
T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple, TypeVar

RESERVED_BYTES = 1024  # of shared memory, that every block leaves
BARRIER_BYTES = 16  # of a stage
STAGE_OUTPUTS = 8  # of a stage of vector_linear and register_linear, at most, and
FEWEST_OUTPUTS = 5  # at least, unless a block has fewer
WARPS = 8  # that multiply there
CHUNK = 32  # inputs that a warp multiplies at a time
CHUNKS = 8  # of a stage, of a warp, at most
KEPT_BYTES = 128  # what lies before register_linear's ring is a multiple: the copy engine fills whole lines sooner
LEAST_COPY, REGISTER_COPY = 1920, 1792  # bytes of a stage's row: the copy engine is hardly faster with less (LOG)
ANY_COPY = 128  # where nothing else fits
MOST_PARTIALS = 16 * 1024  # bytes of vector_linear's sums that wait to be added up
AHEAD_CHUNKS, NORM_CHUNKS = 4, 7  # of a warp of register_linear, if it asks for a step's meanwhile, and with a norm
TILE_INPUTS, TILE_ROW_BYTES = 64, 128  # of a stage of wgmma_linear, of one output or token
TILE_ROWS = 64  # outputs of a product; a stage has up to twice as many
TILE_GROUPS = 2  # warpgroups that multiply, one stage each in turn
MERGING = (0, 5, 11)  # stages that a cluster takes longer, to begin and to merge, by the logarithm of its blocks (LOG)
PACED_BYTES = 26 * 1024  # that register_linear asks for at a time, where it is paced (LOG)
FLOWING = 48 * 1024  # bytes under way that keep the memory busy: its rate times its latency (LOG)


class Product(NamedTuple):
    """The sizes of a linear layer, and what goes with it in one launch."""

    T: int
    N: int
    K: int
    itemsize: int  # of activations, and of the weights unless those are int8
    num_blocks: int
    normed: bool = False
    residual: bool = False
    gated: bool = False  # N/2 gates and N/2 outputs that they let through: a block has both of a pair

    @property
    def outputs(self) -> int:
        """How many a block has, at most."""
        unit = 2 if self.gated else 1
        return ceil(self.N // unit, self.num_blocks) * unit

    @property
    def stride(self) -> int:
        """Numbers from token to token in shared memory."""
        return odd_stride(self.K * self.itemsize) // self.itemsize


class Ring(NamedTuple):
    """What a plan brings into shared memory at a time."""

    num_stages: int
    needed: int  # stages that hold all weights of a block
    stage_bytes: int

    @property
    def flows(self) -> bool:
        """Whether the memory stays busy while a stage is read: not with two stages, however large (LOG)."""
        enough = self.num_stages >= 3 and self.num_stages * self.stage_bytes >= FLOWING
        return self.num_stages >= self.needed or enough


class Tiles(NamedTuple):
    """What linear and int8_linear are told, whose warps share stages of up to 16 outputs."""

    stride: int  # numbers from token to token
    stage_rows: int
    stage_inputs: int
    num_stages: int
    shared_bytes: int


class Steps(NamedTuple):
    """What vector_linear and register_linear are told, whose warps have parts of a stage's inputs."""

    num_steps: int  # in which the inputs come
    tile: int  # outputs of a stage
    stage_stride: int  # bytes from output to output
    num_stages: int
    num_tiles: int  # between two reductions
    shared_bytes: int


class Clusters(NamedTuple):
    """What wgmma_linear is told, whose clusters of blocks divide the inputs of their outputs."""

    num_clusters: int
    log_cluster: int  # blocks of one, as a power of two
    tile: int  # outputs of a stage
    num_stages: int
    sums_at: int  # bytes from the beginning of shared memory, where sums lie, behind the stages or over them,
    held_at: int  # what is added to them,
    barriers_at: int  # and the barriers of the stages
    shared_bytes: int


Plan = TypeVar("Plan", Tiles, Steps, Clusters)
Attempt = tuple[Plan, Ring]


def ceil(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def odd_stride(num_bytes: int) -> int:
    """Bytes between rows in shared memory, an odd number of 64: the 8 rows that a warp reads lie in different banks."""
    return (ceil(num_bytes, 64) | 1) * 64


def paired_bytes(residual: bool, shared_bytes: int) -> int:
    """Bytes that a block takes at most, so that it shares a multiprocessor with one block of the kernel before it.

    In a layer linears with and without a residual take turns, and attention comes between two: those with a residual
    take somewhat more than half, the others what that leaves. `shared_bytes`: that a block can have.
    """
    over, static = 2048, 2048  # static arrays count too
    half = (shared_bytes + RESERVED_BYTES) // 2
    return half + (over if residual else -over - static - 2 * RESERVED_BYTES)


def beside_or_alone(
    make: Callable[[int], Attempt[Plan] | None], residual: bool, shared_bytes: int
) -> Attempt[Plan] | None:
    """What `make` makes of the room beside another kernel's block, or if its ring would run dry there, of all room.

    A linear takes all the room that is its own, used or not. So it never shares a multiprocessor with another block of
    its own, which would have to wait for it while other multiprocessors have nothing to do (LOG).
    """
    paired = paired_bytes(residual, shared_bytes)
    if (beside := make(paired)) and beside[1].flows:
        return beside[0]._replace(shared_bytes=paired), beside[1]
    return make(shared_bytes - RESERVED_BYTES)


@cache
def tiles(product: Product, shared_bytes: int, *, int8: bool = False, grouped: bool = False) -> Attempt[Tiles] | None:
    """The plan of linear or int8_linear in blocks that can have so many bytes; None: they are too few.

    `grouped`: an output's int8 weights have several scales.
    """
    T, K, itemsize, outputs = product.T, product.K, product.itemsize, product.outputs
    room_for = 8 if grouped and T <= 8 else next(most for most in ((3 if int8 else 4), 8, 16) if most >= T)
    warps = 16 if room_for == 8 else 8
    num_tiles = 32 * warps // 16 // max(4, room_for)  # between two reductions: an output for each thread
    chunk, weight_itemsize = (64, 1) if int8 else (CHUNK, itemsize)
    row_bytes = ceil(K, chunk) * chunk * itemsize + 16 if int8 else odd_stride(K * itemsize)
    # 1 to 2 KiB for each output: the copy engine takes as long for less (LOG).
    stage_inputs = ceil(ceil(K, ceil(K, 2048 // weight_itemsize)), chunk) * chunk
    stage_rows = min(16, outputs)
    stage_bytes = stage_rows * odd_stride(stage_inputs * weight_itemsize)
    needed = ceil(outputs, 16) * ceil(K, stage_inputs)
    others = T * row_bytes + 2 * K * itemsize * product.normed + 4 * num_tiles * warps * 16 * T

    def make(room: int) -> Attempt[Tiles] | None:
        num_stages = min((room - others) // (stage_bytes + BARRIER_BYTES), needed)
        if num_stages < 1:
            return None
        taken = others + num_stages * (stage_bytes + BARRIER_BYTES)
        plan = Tiles(row_bytes // itemsize, stage_rows, stage_inputs, num_stages, taken)
        return plan, Ring(num_stages, needed, stage_bytes)

    # 16 warps of int8_linear take more than half of the registers.
    if int8 and room_for == 8:
        return make(shared_bytes - RESERVED_BYTES)
    return beside_or_alone(make, product.residual, shared_bytes)


@cache
def vector(product: Product, shared_bytes: int) -> Attempt[Steps] | None:
    """The plan of vector_linear in blocks that can have so many bytes; None: they are too few."""

    def make(room: int, least_copy: int = LEAST_COPY) -> Attempt[Steps] | None:
        return _most_ahead(_vector_choices(product, room, least_copy), worth=0)

    found = beside_or_alone(make, product.residual, shared_bytes)
    return found or make(shared_bytes - RESERVED_BYTES, ANY_COPY)


@cache
def register(product: Product, shared_bytes: int, divided: bool = False) -> Attempt[Steps] | None:
    """The plan of register_linear in blocks that can have so many bytes; None: they are too few.

    `divided` (split-K): two blocks have the same outputs and half of the inputs each; the product counts such pairs.
    """
    its_own = product._replace(K=product.K // 2) if divided else product

    def make(room: int) -> Attempt[Steps] | None:
        # A tile takes the readers as long whatever it holds, so more of them have to be worth it.
        return _most_ahead(_register_choices(its_own, room, divided), worth=10)

    return beside_or_alone(make, product.residual, shared_bytes)


def at_once(ring: Ring, is_paced: bool) -> int:
    """Stages that register_linear asks for at a time, until its ring is full for the first time.

    Most of that is while the kernel ahead still runs, whose own weights presumably wait behind more (LOG). A ring that
    holds all is filled at once.
    """
    if not is_paced or ring.num_stages >= ring.needed:
        return ring.num_stages
    return max(1, PACED_BYTES // ring.stage_bytes)


def _vector_choices(product: Product, room: int, least_copy: int) -> Iterator[tuple[Steps, Ring, int]]:
    """Ways to cut the stages, with the bytes of weights in each's rows."""
    T, _, K, itemsize, *_ = product
    log_tokens, num_chunks = (2 if T > 2 else T - 1), ceil(K, CHUNK)
    x_bytes = T * odd_stride(K * itemsize) + 2 * K * itemsize * product.normed
    for tile in range(STAGE_OUTPUTS, FEWEST_OUTPUTS - 1, -2 if product.gated else -1):
        tiles_of_all = ceil(product.outputs, tile)
        for num_steps in range(ceil(num_chunks, WARPS * CHUNKS), num_chunks + 1):
            row_bytes = ceil(num_chunks, num_steps) * CHUNK * itemsize
            if num_steps > 1 and row_bytes < least_copy:
                break
            sums_bytes = 4 * num_steps * STAGE_OUTPUTS * T * WARPS
            num_tiles = max(1, min((32 * WARPS >> log_tokens) // tile, tiles_of_all, MOST_PARTIALS // sums_bytes))
            yield _cut(num_steps, tile, num_tiles, row_bytes, tiles_of_all, num_tiles * sums_bytes + x_bytes, room)


def _register_choices(product: Product, room: int, divided: bool) -> Iterator[tuple[Steps, Ring, int]]:
    T, _, K, itemsize, *_ = product
    num_chunks = ceil(K, CHUNK)
    single = num_chunks <= WARPS * CHUNKS
    least_steps = 1 if single else ceil(num_chunks, WARPS * AHEAD_CHUNKS)
    if product.normed and num_chunks > WARPS * NORM_CHUNKS:
        return
    norm_bytes = 1024 + _whole_lines(2 * K * itemsize) if product.normed else 0
    for tile in range(STAGE_OUTPUTS, FEWEST_OUTPUTS - 1, -1):
        num_tiles = ceil(product.outputs, tile)
        for num_steps in range(least_steps, (1 if single else num_chunks) + 1):
            row_bytes = ceil(num_chunks, num_steps) * CHUNK * itemsize
            if num_steps > least_steps and row_bytes < REGISTER_COPY:
                break
            sums = (num_tiles * tile + 3) // 8 * 8 + 4  # of a token and warp, an odd number of fours
            mail_bytes = _whole_lines(8 + 4 * ceil(T, 2) * sums) if divided else 0
            others = _whole_lines(4 * T * WARPS * sums) + norm_bytes + mail_bytes
            yield _cut(num_steps, tile, num_tiles, row_bytes, num_tiles, others, room)


def _whole_lines(num_bytes: int) -> int:
    return ceil(num_bytes, KEPT_BYTES) * KEPT_BYTES


def _cut(
    num_steps: int, tile: int, num_tiles: int, row_bytes: int, tiles_of_all: int, others: int, room: int
) -> tuple[Steps, Ring, int]:
    """Stages of so many outputs and bytes of each, beside other bytes; and how many bytes they bring."""
    stride = odd_stride(row_bytes)
    stage, needed = tile * stride + BARRIER_BYTES, tiles_of_all * num_steps
    fitting = max(0, (room - others) // stage)
    ring = Ring(min(fitting, needed), needed, tile * row_bytes)
    ahead = 2**31 - 1 if fitting >= needed else ring.num_stages * ring.stage_bytes
    return Steps(num_steps, tile, stride, ring.num_stages, num_tiles, others + ring.num_stages * stage), ring, ahead


def _most_ahead(choices: Iterator[tuple[Steps, Ring, int]], worth: int) -> Attempt[Steps] | None:
    """The first with most bytes under way. One behind it has to have more by the `worth`-th part; 0: any more."""
    best, most = None, 0
    for plan, ring, ahead in choices:
        if ahead - most > (most // worth if worth else 0):
            best, most = (plan, ring), ahead
    return best


@cache
def clusters(
    product: Product, shared_bytes: int, most_clusters: tuple[int, ...], log_cluster: int | None = None
) -> Attempt[Clusters] | None:
    """The plan of wgmma_linear in blocks that can have so many bytes; None: they are too few, or there are none.

    `most_clusters` run at once, by the logarithm of their blocks; `log_cluster` names one size, None chooses.
    """
    divided = _divided(product, most_clusters, log_cluster)
    if divided is None:
        return None
    num_clusters, log, tile, num_tiles = divided
    T, num_steps = product.T, ceil(product.K, TILE_INPUTS)
    tile_bytes = ceil(tile, 8) * 8 * TILE_ROW_BYTES
    stage_bytes = tile_bytes + ceil(T, 8) * 8 * TILE_ROW_BYTES
    stride = ceil(tile, 32) * 32 + 4
    sums, mail = 4 * TILE_GROUPS * T * stride, 4 * stride * ceil(T, 1 << log) << log if log else 0
    # Whole tiles are read: what lies behind the last stage has to be there.
    read_rows, read_tokens = (TILE_ROWS if tile <= TILE_ROWS else 2 * TILE_ROWS), (32 if T <= 32 else 64)
    beyond = max(read_rows * TILE_ROW_BYTES, tile_bytes + read_tokens * TILE_ROW_BYTES) - stage_bytes
    needed = ceil(num_steps, 1 << log) * num_tiles
    held_tokens = ceil(T, 1 << log) if product.residual else 0
    held = ceil((held_tokens + 1) * tile * product.itemsize, 16) * 16

    def make(room: int) -> Attempt[Clusters] | None:
        behind = max(sums, beyond) if num_tiles > 1 else beyond
        counter = BARRIER_BYTES if mail else 0
        num_stages = min((room - behind - held - counter) // (stage_bytes + BARRIER_BYTES), needed)
        # A stage is the same warpgroup's in every round (LOG), which keeps one of its own while it waits for the next.
        if num_stages < needed:
            num_stages -= num_stages % TILE_GROUPS
        if num_stages < min(2 * TILE_GROUPS, needed):
            return None
        sums_at = num_stages * stage_bytes if num_tiles > 1 else 0
        held_at = max(num_stages * stage_bytes + behind, sums_at + sums + mail)
        taken = held_at + held + num_stages * BARRIER_BYTES + counter
        if taken > room:
            return None
        plan = Clusters(num_clusters, log, tile, num_stages, sums_at, held_at, held_at + held, taken)
        return plan, Ring(num_stages, needed, stage_bytes)

    return beside_or_alone(make, product.residual, shared_bytes)


def _divided(
    product: Product, most_clusters: tuple[int, ...], log_cluster: int | None
) -> tuple[int, int, int, int] | None:
    """Outputs divided among clusters, and inputs among their blocks.

    Gives clusters, the logarithm of blocks of one, outputs of a stage, and stages that hold all outputs of a cluster.
    """
    num_steps, found, least = ceil(product.K, TILE_INPUTS), None, 2**31 - 1
    for log, most in enumerate(most_clusters):
        num_clusters = min(product.N, most)
        if not num_clusters or not num_steps >> log or (log_cluster is not None and log != log_cluster):
            continue
        outputs = ceil(product.N, num_clusters)
        num_tiles = ceil(outputs, 2 * TILE_ROWS)
        if log and outputs > TILE_ROWS:
            continue  # their sums are as many as those of more steps
        cost = num_tiles * ceil(num_steps, 1 << log) + MERGING[log]
        if cost < least:
            tile = ceil(outputs, num_tiles)
            found, least = (num_clusters, log, tile, ceil(outputs, tile)), cost
    return found
