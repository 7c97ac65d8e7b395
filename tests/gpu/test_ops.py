"""The kernels on a GPU: every case, and what a case cannot see."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from every_shape import every_shape

from eet_lab.errors import KernelError
from eet_lab.ops import cuda, native, reference
from eet_lab.ops.attention import within_window
from eet_lab.ops.cases import CASES, Case
from eet_lab.ops.cuda import choice, linear
from eet_lab.ops.cuda.attention import Split
from eet_lab.ops.encoder_cases import ENCODER_CASES
from eet_lab.ops.records import OPS
from eet_lab.ops.shapes import AttentionShape, LinearShape, copied
from eet_lab.ops.types import Batch, Linear, Norm, fresh
from gpu.launches import launches_of, replayed

pytestmark = pytest.mark.gpu

MOST_BYTES = 50_000_000
"""That a shape may read in fp32 where a test asks the same of every shape: larger ones only take longer."""
MANY_WAYS = ("prefill_attention", "prefill_masked_attention", "texts_attention")
"""Their launches depend on pads and head dims, and no step counts them."""
DECODE = next(case for case in CASES if case.name == "decode_attention")
SPLITS = [Split("decode_attention", blocks, warps) for warps in (4, 8) for blocks in (1, 2, 4, 8)]
SPLITS += [Split("stream_attention", blocks) for blocks in (1, 2, 4, 8)]
BALANCED = Split("balanced_attention")
STREAMED = [Split("stream_attention", 1), Split("stream_attention", 4)]
SPLITS += [BALANCED]
DIVIDED = [
    AttentionShape((700, 1, 130), *heads, decode=True, page=page)
    for heads in ((2, 2, 64), (20, 1, 64), (4, 2, 128))
    for page in (0, 16, 64, 128)
]
DIVIDED += [
    AttentionShape((700, 1, 130), *heads, decode=True, rope=True, normed=heads[2] == 128, page=page)
    for heads in ((20, 1, 64), (4, 2, 128))
    for page in (0, 32)
]
MANY = (3000, *range(1, 160, 10)), (900, 1, 1, 1, 1, 1, 1, 1, 1, 400), (257,) * 19, (1, 2500, 1300, 1, 700), (5,) * 8
DIVIDED += [AttentionShape(rows, *heads, decode=True) for rows in MANY for heads in ((8, 2, 64), (4, 2, 128))]
DIVIDED += [
    AttentionShape(rows, 4, 2, D, decode=True, rope=True, page=64, window=window)
    for rows in MANY[:2]
    for D, window in ((64, None), (128, 700))
]
DIVIDED += [
    AttentionShape((700, 1, 130), 4, 2, D, decode=True, window=200, page=page) for D in (64, 128) for page in (0, 16)
]


@every_shape((*CASES, *ENCODER_CASES))
def test_within_the_budget(case, shape, dtype):
    case.check(getattr(cuda, case.op), shape, "cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [1, 5, 8])
def test_a_norm_of_equal_numbers_is_its_bias(T, dtype):
    """However large they are: a deviation that is a rounding of theirs would be 300 times as large, by eps."""
    C = 1600
    weight, bias, w = (torch.randn(*shape, C, device="cuda").to(dtype) for shape in ((), (), (96,)))
    x = torch.full((T, C), 30_000, device="cuda", dtype=dtype)
    found = cuda.norm_linear(x, Norm(weight, bias, 1e-5), Linear(w, None), empty=fresh)
    assert torch.allclose(found.float(), (bias.float() @ w.float().T).expand(T, -1), rtol=2e-2, atol=0.5)


def run(case, inputs):
    """All outputs of the kernel, those of pads among them: a captured pass cannot select."""
    return Case.call(case, getattr(cuda, case.op), inputs, fresh)


def as_a_step_gives_them(shape):
    """Inputs with the first column that a window shows, which a step of the model computes once for all layers."""
    inputs, window = shape.inputs("cuda", torch.float16, 0), getattr(shape, "window", None)
    if window is None or not getattr(shape, "decode", False):
        return inputs
    return tuple(within_window(each, window, fresh) if isinstance(each, Batch) else each for each in inputs)


def real(inputs):
    """Which outputs are to be looked at: not those of pads."""
    batch = next((each for each in inputs if isinstance(each, Batch)), None)
    return slice(None) if batch is None else batch.columns >= batch.keys.begin[batch.rows]


@pytest.mark.parametrize("T", [1, 3, 6, 12, 33, 97])
@pytest.mark.parametrize("act", ["relu", "gelu", "gelu_tanh", "silu"])
def test_no_activation_hides_nan(act, T):
    x = torch.ones(T, 64, device="cuda", dtype=torch.float16)
    w = Linear(x.new_full((40, 64), 1 / 64), None)
    x[-1, 0] = torch.nan
    out = cuda.norm_linear(x, None, w, act, empty=fresh)
    assert out[-1].isnan().all() and out[:-1].isfinite().all()


@pytest.fixture
def no_tiles(monkeypatch):
    """Products of 9 to 16 tokens are taken as by GPUs that do not multiply in tiles."""
    forget = choice.streaming_kernel.cache_clear, choice.streamed.cache_clear
    monkeypatch.setattr(choice, "FEW_IN_TILES", linear.MOST_TILE_TOKENS + 1)
    for each in forget:
        each()
    yield
    for each in forget:
        each()


@pytest.mark.parametrize(("T", "N", "C"), [(9, 96, 64), (12, 40, 1600), (16, 4800, 1600), (13, 331, 3080)])
@pytest.mark.parametrize(("residual", "act"), [(False, None), (False, "gelu_tanh"), (True, None)])
@pytest.mark.usefixtures("no_tiles")
def test_nine_to_sixteen_tokens_are_streamed_where_there_are_no_tiles(T, N, C, act, residual):
    name = "linear_residual" if residual else "norm_linear"
    case = next(case for case in CASES if case.name == name)
    shape = LinearShape(T, N, C, act, residual=residual)
    assert linear.streaming_kernel(T, N, C, 2, normed=not residual) == "linear"
    for dtype in (torch.float16, torch.bfloat16):
        case.check(getattr(cuda, case.op), shape, "cuda", dtype)


@every_shape((*CASES, *ENCODER_CASES), MOST_BYTES)
def test_a_second_run_gives_the_same_bits(case, shape):
    inputs = shape.inputs("cuda", torch.float16, 1)
    first, second = (run(case, copied(inputs)) for _ in range(2))
    assert torch.equal(first[real(inputs)], second[real(inputs)])


@every_shape((*CASES, *ENCODER_CASES), MOST_BYTES)
def test_it_can_be_captured_and_replayed(case, shape):
    if not getattr(shape, "T", True):
        pytest.skip("without tokens there is nothing to capture")
    inputs = shape.inputs("cuda", torch.float16, 2)
    eager = run(case, copied(inputs))
    mine = copied(inputs)
    captured = replayed(lambda: run(case, mine))
    assert torch.equal(captured[real(inputs)], eager[real(inputs)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_launches_are_as_many_as_declared(case):
    inputs = case.bench[0].inputs("cuda", torch.float16, 0)
    launches = launches_of(lambda: run(case, inputs))
    assert len(launches) == case.launches, launches


@every_shape((case for case in (*CASES, *ENCODER_CASES) if case.name not in MANY_WAYS), MOST_BYTES)
def test_launches_are_as_many_as_a_step_is_said_to_have(case, shape):
    """Whatever kernel takes the shape; cuBLAS may add up the parts of a product, and end it, in one more."""
    if not getattr(shape, "T", True):
        pytest.skip("without tokens there is nothing to launch")
    inputs = as_a_step_gives_them(shape)

    def more(*arguments, empty, **keywords):
        return OPS[case.op].work(*arguments, **keywords).more_launches

    expected = case.launches + Case.call(case, more, inputs, fresh)
    of_cublas = "splitKreduce", "cublasLtEpilogue_t"
    launches = [name for name in launches_of(lambda: run(case, inputs)) if not any(word in name for word in of_cublas)]
    assert len(launches) == expected, launches


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("shape", DIVIDED, ids=str)
def test_however_decode_attention_is_divided(shape, split):
    op = partial(cuda.attention, split=split)
    for dtype in (torch.float16, torch.bfloat16):
        DECODE.check(op, shape, "cuda", dtype)
    inputs = shape.inputs("cuda", torch.float16, 1)
    first, second = (DECODE.call(op, copied(inputs), fresh) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "split",
    [Split("decode_attention", 2, 8), Split("stream_attention", 1), Split("stream_attention", 4), BALANCED],
    ids=str,
)
@pytest.mark.parametrize("page", [0, 32])
@pytest.mark.parametrize("window", [None, 170])
def test_each_row_has_a_column_of_its_own(split, page, window):
    shape = AttentionShape((700, 650, 300), 4, 2, 64, decode=True, page=page, window=window)
    qkv, kv, step, spec = shape.inputs("cuda", torch.float16, 4)
    columns = torch.tensor([699, 511, 400], device="cuda")
    together, cache = step._replace(columns=columns), copied(kv)
    out = cuda.attention(qkv, cache, together, spec, empty=fresh, split=split)
    for row in range(3):
        alone = step._replace(columns=columns[row].expand(3))
        got = cuda.attention(qkv, copied(kv), alone, spec, empty=fresh, split=split)[row]
        # Balanced, all rows decide where one is divided, and so the order of its sums.
        torch.testing.assert_close(got, out[row], rtol=0, atol=1e-3 * (split == BALANCED))
    # A row whose pads reach beyond its column sees that column alone.
    begin = torch.tensor([0, 600, 401], device="cuda")
    empty = together._replace(keys=together.keys._replace(begin=begin))
    out = cuda.attention(qkv, copied(kv), empty, spec, empty=fresh, split=split)
    value = qkv[1:, 6 * 64 :].view(2, 2, 1, 64).expand(2, 2, 2, 64)
    assert torch.equal(out[1:], value.reshape(2, 256))


@pytest.mark.parametrize("split", [Split("decode_attention"), *STREAMED, BALANCED], ids=str)
@pytest.mark.parametrize("window", [None, 255])
def test_a_replayed_decode_goes_from_stage_to_stage(split, window):
    shape = AttentionShape((300, 320), 4, 4, 64, decode=True, slack=300, window=window)
    qkv, kv, step, spec = shape.inputs("cuda", torch.float16, 5)
    columns, plain = torch.tensor([382], device="cuda"), copied(kv)
    step = step._replace(columns=columns.expand(2))
    out = replayed_steps(lambda: cuda.attention(qkv, kv, step, spec, empty=fresh, split=split), columns, 4)
    for i, got in enumerate(out):
        seen = step.keys._replace(spans=None)  # the host knows where the columns were at first
        at = step._replace(columns=torch.full((2,), 382 + i, device="cuda"), spans=None, keys=seen)
        expected = DECODE.call(reference.attention, (qkv, plain, at, spec), fresh)
        torch.testing.assert_close(got, expected, rtol=0, atol=4e-3)


def replayed_steps(call, columns, num_steps):
    """What a captured call gives while the column goes on."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    found = []
    for _ in range(num_steps):
        graph.replay()
        found.append(out.clone())
        columns.add_(1)
    return found


def test_a_stream_is_refused_where_there_is_none():
    shape = AttentionShape((9, 20), 4, 4, 80, decode=True)
    with pytest.raises(KernelError, match=r"needs Hopper, .* the head dim is 80, .* Leave split out"):
        cuda.attention(*shape.inputs("cuda", torch.float16, 0), empty=fresh, split=Split("stream_attention"))
    shape = AttentionShape((9, 20), 4, 4, 64, decode=True, masked=True)
    qkv, kv, step, spec, mask = shape.inputs("cuda", torch.float16, 0)
    with pytest.raises(KernelError, match="and mask is not None"):
        cuda.masked_attention(qkv, kv, step, spec, mask=mask, empty=fresh, split=Split("stream_attention"))


@pytest.mark.parametrize("split", [Split("decode_attention"), Split("stream_attention"), BALANCED], ids=str)
def test_a_replayed_decode_sees_where_the_column_is_now(split):
    shape = AttentionShape((9, 20), 4, 4, 64, decode=True, slack=12)
    qkv, kv, step, spec = shape.inputs("cuda", torch.float16, 3)
    columns = torch.tensor([15], device="cuda")
    step = step._replace(columns=columns.expand(2))
    cuda.attention(qkv, copied(kv), step, spec, empty=fresh, split=split)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda.attention(qkv, kv, step, spec, empty=fresh, split=split)
    columns.add_(10)
    graph.replay()
    expected = DECODE.call(partial(cuda.attention, split=split), (qkv, copied(kv), step, spec), fresh)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_meta_trace_asks_for_the_same_memory(case):
    for shape in case.shapes:
        inputs = shape.inputs("cuda", torch.float16, 0)
        on_meta = moved(inputs, "meta")
        assert asked(case, inputs) == asked(case, on_meta)


def asked(case, inputs):
    requests = []

    def empty(name, shape, like, dtype=None):
        requests.append((name, tuple(shape), dtype or like.dtype))
        return like.new_empty(shape, dtype=dtype)

    case.call(getattr(cuda, case.op), inputs, empty)
    return requests


def moved(tree, device):
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, tuple):
        parts = [moved(part, device) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


def test_a_launch_that_fails_names_the_launcher_and_the_sizes():
    pointers = "out best x rows weight bias residual norm_weight norm_bias positions noise temperature stream"
    numbers = "dtype act gated stride stage_rows stage_inputs num_stages shared_bytes dependent"
    given = dict.fromkeys(pointers.split()) | dict.fromkeys(numbers.split(), 0)
    with pytest.raises(KernelError, match=r"eet_linear failed: invalid argument.*T=17, N=8, K=8"):
        native.load("linear").eet_linear(**given, T=17, N=8, K=8, eps=0.0, num_blocks=1)


def test_what_is_not_supported_is_said():
    x, w = torch.zeros(2, 12, device="cuda"), torch.zeros(8, 12, device="cuda")
    with pytest.raises(KernelError, match="12 channels"):
        cuda.linear_residual(x, Linear(w, None), torch.zeros(2, 8, device="cuda"), empty=fresh)
    with pytest.raises(KernelError, match="float64"):
        cuda.linear_residual(x.double(), Linear(w.double(), None), x.double(), empty=fresh)
    x = torch.zeros(2 * 16 + 1, device="cuda")[1:].view(2, 16)
    with pytest.raises(KernelError, match="multiple of 16 bytes"):
        cuda.linear_residual(x, Linear(x, None), torch.zeros(2, 2, device="cuda"), empty=fresh)


def test_a_kernel_from_a_cell_runs():
    text = """
    __global__ void twice(float* x, int n) { int i = blockIdx.x * 256 + threadIdx.x; if (i < n) x[i] *= 2; }
    extern "C" cudaError_t my_twice(float* x, int n, cudaStream_t stream) {
      twice<<<(n + 255) / 256, 256, 0, stream>>>(x, n);
      return cudaGetLastError();
    }
    """
    x = torch.ones(1000, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    native.compile_source(text, "twice").my_twice(x=x.data_ptr(), n=len(x), stream=stream)
    assert torch.equal(x, torch.full_like(x, 2))
