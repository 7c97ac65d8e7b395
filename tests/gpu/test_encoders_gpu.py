"""Encoders over our kernels: hidden states, and what tasks make of them."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
import test_vision
import torch
import transformers
from encoders import V, texts, theirs

from eet_lab.engine import tasks
from eet_lab.engine.encode import EncoderEngine
from eet_lab.errors import OutOfMemory
from eet_lab.models import load
from eet_lab.models.decoder import mapped
from eet_lab.ops import cuda
from eet_lab.ops.types import Linear, fresh
from eet_lab.parts import launch
from eet_lab.parts.passes import Batching, Image, Text
from eet_lab.technique import Recipe

pytestmark = pytest.mark.gpu
PACKED = "pre_padding,mask_removal,memory_reuse,packed_prefill"
RECIPES = (
    "fused_kernels",
    "pre_padding,fused_kernels",
    "pre_padding,mask_removal,fused_kernels",
    f"{PACKED},fused_kernels",
    f"{PACKED},fused_kernels,cuda_graphs",
)
CAPTURED = {
    "packed": f"{PACKED},fused_kernels,cuda_graphs",
    "padded": "pre_padding,mask_removal,memory_reuse,fused_kernels,cuda_graphs",
}
MODELS = {"bert": tasks.CLS, "bert-mlm": tasks.MLM, "roberta-classes": tasks.CLASSES, "wide": tasks.MEAN}
"""Each with one of the tasks that it has a head for."""


def model(name: str):
    if name != "wide":
        return theirs(name)
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2, vocab_size=V)
    return transformers.BertModel(transformers.BertConfig(**sizes)).eval()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_they_are_as_near_to_fp64_as_plain_ops(name, recipe, dtype):
    """Twice the error of plain ops, and 4 eps of the largest number: the house's budget."""
    for task in (tasks.HIDDEN, MODELS[name]):
        exact = read(name, "baseline", torch.float64, task, device="cpu")
        ours, plain = (
            max(float((got.double() - want.double()).abs().max()) for got, want in zip(run, exact, strict=True))
            for run in (read(name, each, dtype, task) for each in (recipe, "baseline"))
        )
        largest = max(float(value.abs().max()) for value in exact)
        assert ours <= 2 * plain + 4 * torch.finfo(dtype).eps * largest


def read(name, recipe, dtype, task, device="cuda"):
    of_file = torch.float32 if dtype == torch.float64 else dtype
    encoder = load(model(name), device=device, dtype=of_file).encoder
    if dtype == torch.float64:
        encoder = mapped(encoder, torch.Tensor.double)
    return EncoderEngine(encoder, Recipe.parse(recipe, device).parts).read(texts(), task, Batching(64)).values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gelu_of_every_number_of_16_bits(dtype):
    """Rounded once, after an error of 3e-7; and of what is no number."""
    number = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    x, weight = torch.zeros(len(number), 8, dtype=dtype, device="cuda"), torch.zeros(8, 8, dtype=dtype, device="cuda")
    x[:, 0], weight[:, 0] = number, 1
    got = cuda.norm_linear(x, None, Linear(weight, None), "gelu", empty=fresh)
    exact = torch.nn.functional.gelu(number.double())
    finite, eps, least = number.isfinite(), torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    off = (got[:, 0].double() - exact).abs()[finite]
    assert (off <= eps / 2 * (exact[finite].abs() + least) + 3e-7).all()
    assert got[number.isnan()].isnan().all() and (got[number == torch.inf] == torch.inf).all()


def test_passes_in_flight_come_in_order():
    encoder = load(model("wide"), device="cuda", dtype=torch.float16).encoder
    engine = EncoderEngine(encoder, Recipe.parse(f"{PACKED},fused_kernels", "cuda").parts)
    one_by_one, told = engine.read(texts(), tasks.HIDDEN, Batching(1)), []
    for batching in (Batching(1), Batching(30), Batching()):
        run = engine.read(texts(), tasks.HIDDEN, batching, progress=lambda done, *others: told.append(done))
        for got, want in zip(run.values, one_by_one.values, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0.02)
    assert told[: len(texts())] == list(range(1, len(texts()) + 1))


# --- captured passes


def of_lengths(*lengths: int, seed: int = 0) -> list[Text]:
    draw = np.random.default_rng(seed)
    return [Text(draw.integers(5, V, length).tolist(), None, sorted({0, length - 1})) for length in lengths]


def engines(recipe: str, dtype=torch.float16, name: str = "wide", **limits) -> tuple[EncoderEngine, EncoderEngine]:
    """One that captures, and one that launches the same kernels from Python."""
    encoder, parts = load(model(name), device="cuda", dtype=dtype).encoder, Recipe.parse(recipe, "cuda").parts
    captured = replace(parts, launch=replace(parts.launch, **limits))
    return EncoderEngine(encoder, captured), EncoderEngine(encoder, replace(parts, launch=launch.eager))


def assert_alike(got, exact, dtype=torch.float16):
    """Products of other sizes may add in another order."""
    assert len(got) == len(exact)
    eps = torch.finfo(dtype).eps * (64 if dtype == torch.float32 else 8)
    for mine, its in zip(got, exact, strict=True):
        assert bool(mine.isfinite().all())
        torch.testing.assert_close(mine, its, rtol=0, atol=eps * float(its.abs().max()))


LISTS = [
    of_lengths(9, 3, 20, 5, seed=1),  # these three share a bucket
    of_lengths(33, 2, seed=2),
    of_lengths(*range(1, 7), seed=3),
    of_lengths(*[128] * 8, seed=4),  # 1,024 tokens: a full bucket
    of_lengths(*[128] * 8, 1, seed=5),  # one more
    of_lengths(300, 7, 500, 120, 512, seed=6),
    of_lengths(5, seed=7),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", CAPTURED)
@pytest.mark.parametrize("name", MODELS)
def test_captured_passes_are_those_that_are_not(name, layout, dtype):
    """In turn, so that graphs take each other's place in memory: eagerly, then captured, then replayed."""
    captured, plain = engines(CAPTURED[layout], dtype, name)
    lists = LISTS if name == "wide" else [[Text(t.ids[:40], None, t.asked[:1]) for t in given] for given in LISTS]
    for task in (tasks.HIDDEN, tasks.MEAN, MODELS[name]):
        exact = [plain.read(given, task).values for given in lists]
        found = [captured.read(given, task).values for _ in range(3) for given in lists]
        for got, want in zip(found, exact * 3, strict=True):
            assert_alike(got, want, dtype)
    assert captured.captures >= 3 * (3 if layout == "packed" else 2) and plain.captures == 0
    captured.close()
    assert captured.held_bytes == 0


@pytest.mark.parametrize("layout", CAPTURED)
def test_a_pass_is_one_launch(layout):
    """And copies: what it reads, its result beside the graph's memory, and that to the host."""
    captured, _ = engines(CAPTURED[layout])
    for _ in range(2):
        captured.read(LISTS[0], tasks.MEAN)
    assert captured.captures == 1
    with torch.profiler.profile(activities=[*torch.profiler.supported_activities()]) as profile:
        for given in LISTS[:3]:
            captured.read(given, tasks.MEAN)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CPU]
    calls = {call: sum(name.startswith(call) for name in names) for call in ("cudaGraphLaunch", "cudaLaunchKernel")}
    assert calls["cudaGraphLaunch"] == 3 and calls["cudaLaunchKernel"] <= 3, calls
    assert captured.captures == 1, "other texts of the same bucket are captured no more"


def test_what_a_caller_keeps_is_not_overwritten():
    captured, plain = engines(CAPTURED["packed"])
    for task in (tasks.MEAN, tasks.HIDDEN, tasks.CLS):
        kept = [(captured.read(LISTS[at % 3], task).values, plain.read(LISTS[at % 3], task).values) for at in range(9)]
        copies = [torch.cat([*got]).clone() for got, _ in kept]
        for given in LISTS[:3] * 2:
            captured.read(given, task)
        for (got, exact), copy in zip(kept, copies, strict=True):
            assert torch.cat([*got]).equal(copy)
            assert_alike(got, exact)


def test_passes_in_flight_are_of_different_buckets():
    """Some of one run are captured, and some are larger than that; they come in order."""
    captured, plain = engines(CAPTURED["packed"], tokens=300)
    given = [text for each in LISTS for text in each]
    for tokens in (64, 200, 300, 700, 4096):
        for _ in range(3):
            got = captured.read(given, tasks.HIDDEN, Batching(tokens)).values
            assert_alike(got, plain.read(given, tasks.HIDDEN, Batching(tokens)).values)
    assert captured.captures > 3
    for _ in range(3):
        found = []
        captured.read_each(((each, Batching()) for each in LISTS), tasks.HIDDEN, found.append)
        for each, run in zip(LISTS, found, strict=True):
            assert_alike(run.values, plain.read(each, tasks.HIDDEN).values)


def test_memory_of_captured_passes_is_flat():
    """Over 200 passes, with fewer graphs kept than there are buckets, and with enough of them."""
    for graphs in (3, 64):
        captured, _ = engines(CAPTURED["packed"], graphs=graphs)
        for given in LISTS[::-1] * 3:
            captured.read(given, tasks.MEAN)
        torch.cuda.synchronize()
        held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        captures = captured.captures
        for number in range(200):
            captured.read(LISTS[number % len(LISTS)], tasks.MEAN)
        assert torch.cuda.memory_allocated() <= held + (1 << 20)
        assert torch.cuda.memory_reserved() <= reserved + (64 << 20)
        assert (captured.captures == captures) == (graphs == 64)
        captured.close()


def test_a_full_memory_in_a_capture_is_told(monkeypatch):
    captured, plain = engines(CAPTURED["packed"])
    captured.read(LISTS[0], tasks.MEAN)
    real = launch.capture

    def full(work, pool=None):
        def then_full():
            work()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

        return real(then_full, pool)

    monkeypatch.setattr(launch, "capture", full)
    with pytest.raises(OutOfMemory, match="could not be allocated"):
        captured.read(LISTS[0], tasks.MEAN)
    monkeypatch.undo()
    for _ in range(3):
        assert_alike(captured.read(LISTS[0], tasks.MEAN).values, plain.read(LISTS[0], tasks.MEAN).values)


def test_a_captured_pass_of_few_texts_takes_a_fraction_of_the_host():
    """12 layers of 768 channels, some 128 tokens: best of many."""
    encoder = load("bert-base", device="cuda", dtype=torch.float16).encoder
    words, given, ms = CAPTURED["packed"], of_lengths(60, 20, 40), []
    for recipe in (words.removesuffix(",cuda_graphs"), words):
        engine, times = EncoderEngine(encoder, Recipe.parse(recipe, "cuda").parts), []
        for _ in range(30):
            begin = perf_counter()
            engine.read(given, tasks.MEAN)
            times.append((perf_counter() - begin) * 1e3)
        ms.append(min(times[3:]))
    print(f"{ms[0]:.2f} ms launched by Python, {ms[1]:.2f} ms captured")
    assert ms[1] < ms[0] / 2


def test_patches_of_any_size():
    """108 numbers a patch, which is no multiple of 8."""
    torch.manual_seed(5)
    config = transformers.ViTConfig(**test_vision.SIZES | {"patch_size": 6, "num_channels": 3})
    encoder = load(transformers.ViTModel(config).eval(), device="cuda").encoder
    images = [Image(pixels, config.patch_size) for pixels in torch.randn(3, 3, 24, 24)]
    plain, ours = (
        EncoderEngine(encoder, Recipe.parse(words, "cuda").parts).read(images, tasks.HIDDEN).values
        for words in ("baseline", f"{PACKED},fused_kernels")
    )
    for got, want in zip(ours, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
