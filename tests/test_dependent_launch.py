"""Dependent launch without a GPU: which ops it changes, what reaches launchers, and the order inside kernels."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import ClassVar

import pytest
import torch
from opened import opened

from eet_lab.bench.compare import rungs_down, rungs_up
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import RecipeError
from eet_lab.models import weights
from eet_lab.models.config import Config
from eet_lab.ops import cuda, native
from eet_lab.ops.native.build import source
from eet_lab.ops.native.launchers import signatures
from eet_lab.parts import Parts
from eet_lab.paths import csrc_dir
from eet_lab.technique import Recipe, Technique, names_in_all, register
from eet_lab.techniques import DependentLaunch

NEEDED = "memory_reuse,fused_kernels"
ALL = ",".join(names_in_all())
IN_LAYERS = {"norm_linear", "linear_residual", "linear_residual_norm", "masked_attention", "attention"}


def parts(words: str) -> Parts:
    return Recipe.parse(words).parts


def dependent_slots(words: str) -> set[str]:
    ops = parts(words).ops
    found = {f.name: getattr(getattr(ops, f.name), "keywords", {}) for f in fields(ops)}
    return {name for name, keywords in found.items() if keywords.get("dependent")}


# --- recipes


def test_it_needs_a_cache_that_lies_still_and_kernels_of_ours():
    for words, missing in (("memory_reuse", "fused_kernels"), ("fused_kernels", "memory_reuse")):
        with pytest.raises(RecipeError, match=f"dependent_launch needs {missing}"):
            Recipe.parse(f"{words},dependent_launch")
    assert DependentLaunch.numerics == "exact"


def test_every_op_of_ours_becomes_dependent_and_plain_ones_stay():
    others = {"embed_norm", "cross_attention"}  # which no decoder calls
    assert dependent_slots(ALL) == {f.name for f in fields(parts(ALL).ops)} - others
    assert dependent_slots(f"{NEEDED},dependent_launch") == {*IN_LAYERS, "next_token"}
    assert dependent_slots(ALL.replace(",dependent_launch", "")) == set()
    plain, early = parts(NEEDED).ops, parts(f"{NEEDED},dependent_launch").ops
    assert early.embed is plain.embed and early.advance is plain.advance
    assert early.kernels == plain.kernels


def test_what_else_was_chosen_of_an_op_stays():
    words = "memory_reuse,fused_kernels:norm_rows=2"
    plain, early = (parts(each).ops.norm_linear for each in (words, f"{words},dependent_launch"))
    assert early.func is plain and plain.keywords == {"norm_rows": 2}
    assert early.__name__ == "norm_linear", "launches are declared by name"


def test_it_takes_its_turn_after_graphs():
    names = Recipe.parse(ALL).names
    assert names.index("dependent_launch") == names.index("cuda_graphs") + 1


def test_the_ladder_adds_it_last_and_leaves_it_out_with_what_it_needs():
    full = Recipe.parse(ALL)
    *_, last = rungs_up(full)
    assert (last.name, last.along, last.recipe) == ("dependent_launch", (), full)
    gone = {each.name: each.along for each in rungs_down(full)}
    assert gone["dependent_launch"] == ()
    assert "dependent_launch" in gone["memory_reuse"] and "dependent_launch" in gone["fused_kernels"]
    assert gone["fused_sampling"] == ()


def test_an_op_from_a_cell_can_still_take_the_place_of_one_that_it_wrapped(forgotten):
    @register
    @dataclass(frozen=True)
    class Own(Technique):
        """Attention of a learner's own."""

        name: ClassVar[str] = "own"
        title: ClassVar[str] = "Own"
        requires: ClassVar[tuple[str, ...]] = ("fused_kernels",)

        def apply(self, parts: Parts) -> Parts:
            return replace(parts, ops=replace(parts.ops, attention=cuda.attention))

    assert dependent_slots(f"{ALL},own") == dependent_slots(ALL) - {"attention"}


@pytest.mark.parametrize(
    ("capability", "says"),
    [((8, 9), r"Some GPU has compute capability 8.9, but dependent launch needs .* 9.0 \(Hopper\)"), ((9, 0), None)],
)
def test_older_gpus_are_told_and_it_is_the_models_gpu_that_is_asked(capability, says, monkeypatch):
    asked = []
    monkeypatch.setattr(native, "available", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: asked.append(device) or capability)
    reason = DependentLaunch().unavailable("cuda:1")
    assert re.match(says, reason) if says else reason is None
    assert asked == ["cuda:1"]


def test_it_is_refused_on_a_cpu():
    reason = DependentLaunch().unavailable("cpu")
    assert "NVIDIA GPU" in reason and "compute capability 9.0 (Hopper) or newer" in reason


# --- launches


class Library:
    """Launchers that launch nothing: they note their names, and what each was told of `dependent` (None: nothing)."""

    path = "fake"

    def __init__(self, kernel: str, launched: list[tuple[str, bool | None]]) -> None:
        self._signatures, self._launched = signatures(source(kernel).read_text()), launched

    def __getattr__(self, name: str):
        takes = {parameter.name for parameter in self._signatures[name]}

        def launch(**arguments):
            assert set(arguments) == takes
            if "stream" not in takes:  # it tells of the GPU
                return
            self._launched.append((name, bool(arguments["dependent"]) if "dependent" in takes else None))

        return launch


@pytest.fixture
def launched(monkeypatch):
    """The ops over kernels, on a CPU."""
    launches: list[tuple[str, bool | None]] = []
    monkeypatch.setattr(native, "loaded", cache(lambda kernel: Library(kernel, launches)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return launches


def passes(words: str, launched: list, settings: Settings, num_rows: int = 2) -> tuple[list, list]:
    """What a prefill and a decode step launch."""
    model = weights.random_decoder(Config(2, 64, 2, 256, 504, 128), 0, torch.device("cpu"), torch.float16)
    made = parts(words)
    slots = opened(Engine(model, made), [[1 + row] * (20 + row) for row in range(num_rows)], settings)
    found = []
    with torch.inference_mode():
        for _ in range(2):
            launched.clear()
            slots.step()
            found.append(list(launched))
    return found[0], found[1]


GRAPHLESS = ALL.replace(",cuda_graphs", "")  # a CPU cannot capture


@pytest.mark.parametrize("num_rows", [2, 3])
@pytest.mark.parametrize("settings", [Settings(4), Settings(4, temperature=0.7, top_k=9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "words",
    [
        GRAPHLESS,
        GRAPHLESS.replace("fused_sampling,", ""),
        GRAPHLESS.replace("mask_removal,", "").replace("packed_prefill,", ""),
        f"{GRAPHLESS},int8_weights",
    ],
    ids=["all", "no-fused_sampling", "masked", "int8"],
)
@pytest.mark.usefixtures("layers_of_any_size")
def test_every_launch_of_a_step_that_can_is_dependent(words, settings, num_rows, launched):
    prefill, step = passes(words, launched, settings, num_rows)
    by_layer = num_rows == 2 and "int8_weights" not in words
    assert [name for name, _ in step].count("eet_vector_layer") == 2 * by_layer
    assert len(step) >= (2 if by_layer else 5) * 2 + 1
    assert all(dependent for _, dependent in step), step
    assert all(dependent is not False for _, dependent in prefill), prefill
    without = passes(words.replace(",dependent_launch", ""), launched, settings, num_rows)
    assert [[name for name, _ in launches] for launches in without] == [
        [name for name, _ in launches] for launches in (prefill, step)
    ]
    assert not any(dependent for launches in without for _, dependent in launches)


def test_what_writes_the_cache_in_a_long_prefill_waits_for_all(launched):
    prefill, _ = passes(GRAPHLESS, launched, Settings(4))
    assert prefill.count(("eet_append", None)) == 2, "one a layer, launched without the attribute"


# --- kernels: the invariant of csrc/eet/dependent.cuh

KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^{;]*?\)\s+)?(\w+_kernel|\w+)\([^{;]*?\)\s*\{")
AHEAD = {
    "linear_kernel",
    "vector_linear_kernel",
    "register_linear_kernel",
    "wgmma_linear_kernel",
    "norm_kernel",
    "norm_of_few_kernel",
    "vector_layer_kernel",
    "int8_linear_kernel",
    "decode_kernel",
    "stream_attention_kernel",
    "balanced_attention_kernel",
}
"""These let the next kernel begin before their own wait: none is a step's first, and after each comes one that reads
weights ahead of its wait, or columns of earlier steps, and nothing else."""
ASIDE = re.compile(r"if \(warp [=>]= k(?:Tile)?Warps(?:<kDim>)?\) \{")
FIRST_PHASE = "for (int p = 0; p < a.num_phases; ++p) {", "if (p == 0) {"
"""What a kernel of several phases, which always has a first one, may stand in to wait."""


def kernels() -> dict[str, str]:
    """The bodies of all kernels whose launchers have the parameter."""
    found = {}
    for name in native.all_names():
        text = re.sub(r"//.*", "", source(name).read_text())
        if "int dependent" in text:
            found |= {match[1]: whole(block(text, match.end())) for match in KERNEL.finditer(text)}
    return found


SHARED = (
    (
        "eet::multiply_tiles<",
        r"eet::multiply_tiles<.*?>\(a, shared(?:, choice)?\);",
        "linear_tiles.cuh",
        "multiply_tiles",
    ),
    (
        "products.multiply(norm, share,",
        r"products\.multiply\(norm, share,.*?\}\);",
        "register_product.cuh",
        "all_steps",
    ),
)
"""What kernels call that waits for them: how a call begins, all of it, and where it is defined, in csrc/eet."""


def whole(body: str) -> str:
    """With what waits in the place of its call, and waits without the numbers that are computed before them."""
    for begin, call, file, name in SHARED:
        text = re.sub(r"//.*", "", (csrc_dir() / "eet" / file).read_text())
        shared = block(text, re.search(rf"void {name}\([^{{;]*?\)(?: const)?\s*\{{", text).end())
        shared = re.sub(r"\b(wait_for_previous|let_next_begin)\(", r"eet::\1(", shared)
        if is_unconditional(begin, body):
            body = re.sub(call, lambda _, shared=shared: shared, body, flags=re.DOTALL)
    return re.sub(r"eet::wait_for_previous\([^;]*\);", "eet::wait_for_previous();", body)


def block(text: str, begin: int) -> str:
    """From behind an opening brace up to the one that closes it."""
    depth = 1
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[begin:end]
    raise AssertionError("a brace is not closed")


def without_opening(body: str, opened: tuple[str, ...], statement: str) -> str:
    """The body with a statement's surroundings taken away: blocks that are opened so, one in the other."""
    for opening in opened:
        for found in list(re.finditer(re.escape(opening), body)):
            inside = block(body, found.end())
            if statement in inside:
                body = body[: found.start()] + inside + body[found.end() + len(inside) + 1 :]
                break
    return body


def outermost(body: str) -> str:
    """A kernel's own statements, without what stands in braces."""
    while "{" in body:
        body = re.sub(r"\{[^{}]*\}", ";", body)
    return body


def is_unconditional(statement: str, body: str) -> bool:
    """Whether it is one of a kernel's own statements, and the whole of it."""
    return re.search(r"(?:^|;)\s*" + re.escape(statement), outermost(body)) is not None


@pytest.mark.parametrize("condition", ["if (blockIdx.x % 2) ", "if (blockIdx.x % 2) {", "for (; false;) "])
@pytest.mark.parametrize(
    "call",
    [
        "eet::multiply_tiles<kTokens, Product, eet::NoScales>(a, shared);",
        "products.multiply(norm, share, outputs.place(n), [&] { outputs.request_residual(n); });",
    ],
)
def test_a_condition_around_what_waits_for_a_kernel_is_seen(call, condition):
    wait = "eet::wait_for_previous();"
    assert is_unconditional(wait, whole(call))
    assert not is_unconditional(wait, whole(condition + call + "}" * condition.count("{")))


def test_a_wait_for_numbers_always_waits_where_none_is_negative():
    """Its predicate is false only where together they have all bits, among them the sign."""
    text = re.sub(r"//.*", "", (csrc_dir() / "eet" / "dependent.cuh").read_text())
    assert "const int bits = (... | bits_of(computed));" in text
    assert "setp.ne.s32 p, %0, -1;\\n  @p griddepcontrol.wait;" in text


def test_a_bias_and_a_norm_do_not_wait_behind_the_weights():
    """Behind them, GPT-2 with one row was 10 % slower, and L16 with four 1 % (LOG)."""
    body = kernels()["vector_linear_kernel"]
    places = [body.index(each) for each in ("request_bias(", "request_norm(", "__syncthreads()", "WeightStream ")]
    assert max(places[:2]) < places[2] < places[3]
    body = kernels()["register_linear_kernel"]
    filler = block(body, ASIDE.search(body).end())
    assert filler.index("eet::barrier(kRequested, ") < filler.index("WeightStream ")
    readers = body[body.index(filler) + len(filler) :]
    places = [readers.index(each) for each in ("request_bias(", "norm.request()", "arrive_at_barrier(kRequested, ")]
    assert max(places[:2]) < places[2] < readers.index("RegisterProducts<")


def test_all_kernels_of_a_step_are_looked_at():
    ends = {"embed_kernel", "choose_kernel", "choose_best_kernel", "choose_top_k_kernel", "advance_kernel"}
    assert ends | {"decode_kernel"} <= set(kernels())
    assert set(kernels()) >= AHEAD


@pytest.mark.parametrize("name", sorted(kernels()))
def test_a_kernel_waits_in_every_block_and_then_lets_the_next_begin(name):
    body = kernels()[name]
    waits, lets = (f"eet::{call}();" for call in ("wait_for_previous", "let_next_begin"))
    body = without_opening(body, FIRST_PHASE, waits)
    assert body.count(waits) == body.count(lets) == 1
    assert is_unconditional(waits, body) and is_unconditional(lets, body)
    before = body[: body.index(waits)]
    if leaves := ASIDE.search(before):
        begin = leaves.end()
        before = before[:begin] + before[begin + len(block(before, begin)) :]
    assert "return;" not in before, "warps beside those that multiply may leave without a wait, never a block"
    assert (body.index(lets) < body.index(waits)) == (name in AHEAD)
