"""What a benchmark is told before any work: what fits into memory, whose model it is, and recipes that are the same."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import ClassVar

import pytest
import torch
from counted import Counted

from eet_lab import models
from eet_lab.bench import Workload, benchmark, fit, peers
from eet_lab.bench.benchmark import RecipeProvider
from eet_lab.bench.cost import streaming_gb_per_s
from eet_lab.bench.parity import ParityCheck, reference_logits
from eet_lab.bench.rows import distinct
from eet_lab.cli import main
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.errors import Cancelled, OutOfMemory, PromptError
from eet_lab.memory import live_bytes
from eet_lab.models import load
from eet_lab.models.decoder import mapped, num_bytes, tensors
from eet_lab.ops import reference
from eet_lab.ops.oom import memory_for
from eet_lab.parts import Parts
from eet_lab.technique import Recipe, Technique

NO_PADS = "pre_padding,mask_removal"
FAST = f"{NO_PADS},memory_reuse"


@pytest.fixture
def no_work(monkeypatch) -> None:
    """Fails where something is run."""
    monkeypatch.setattr(ParityCheck, "__init__", lambda *given, **options: pytest.fail("something was run"))


def needs(model, words: str, text: str) -> int:
    """Bytes of a run."""
    workload = Workload.parse(text)
    rows = [[1] * length for length in workload.lengths]
    return Engine(model.decoder, Recipe.parse(words).parts).forecast(rows, Settings(workload.new_tokens)).total_bytes


def holds(monkeypatch, model, num_bytes: int) -> None:
    """The machine has so much for the weights and all else."""
    monkeypatch.setattr(fit, "free_bytes_of", lambda device: num_bytes - model.decoder.weight_bytes)


def test_what_does_not_fit_is_refused_in_the_words_of_its_forecast(tiny, monkeypatch, no_work):
    text = "tiny/b64/p90/n8"
    holds(monkeypatch, tiny, needs(tiny, "baseline", text) - 1)
    with pytest.raises(OutOfMemory, match=r"64 rows of 90 \+ 8 tokens: does not fit\. .* Would fit: \d+ rows of this"):
        benchmark(tiny, text, "baseline")


def test_int8_copies_that_are_there_already_need_no_room_again(tiny, monkeypatch):
    model, recipe = replace(tiny, network=mapped(tiny.decoder, torch.clone)), Recipe.parse("int8_weights")

    def refusal(num_bytes: int) -> str:
        holds(monkeypatch, model, num_bytes)
        with pytest.raises(OutOfMemory) as told:
            fit.check_fit(model.decoder, "cpu", Workload.parse("tiny/b64/p90/n8"), [recipe])
        return str(told.value)

    other = replace(tiny, network=mapped(tiny.decoder, torch.clone))
    held = num_bytes([t for t in tensors(Engine(other.decoder, recipe.parts).model) if t.dtype == torch.int8])
    enough = needs(model, "baseline", "tiny/b64/p90/n8")  # for the baseline alone
    before = refusal(enough + 2 * held)
    assert "int8_weights, kept side by side, and the check of the output take" in before
    Engine(model.decoder, recipe.parts)
    there = num_bytes(recipe.parts.weights[0].held(model.decoder))
    assert 2 * held > there > held > 0, "with scales"
    assert refusal(enough + 2 * held - there) == before


def test_copies_that_two_recipes_share_are_there_once(tiny):
    model = replace(tiny, network=mapped(tiny.decoder, torch.clone))
    both = [Recipe.parse("int8_weights"), Recipe.parse("int8_weights:head=False")]
    assert fit._held_bytes(model.decoder, both) == 0
    for recipe in both:
        Engine(model.decoder, recipe.parts)
    assert fit._held_bytes(model.decoder, both) == fit._held_bytes(model.decoder, both[:1]) > 0
    assert fit._held_bytes(model.decoder, [Recipe()]) == 0


def test_a_recipe_that_does_not_fit_is_left_out_and_told(tiny, monkeypatch):
    text = "tiny/b64/p90/n8"
    small, large = sorted(("baseline", FAST), key=lambda words: needs(tiny, words, text))
    assert small == "baseline", "else there is nothing to hold the others against"
    monkeypatch.setattr(fit, "benchmark_peak", lambda *given: 0)
    holds(monkeypatch, tiny, needs(tiny, large, text) - 1)
    rows, remarks = benchmark(tiny, text, [small, large], repeats=1)
    assert [row.recipe for row in rows] == [small]
    [remark] = [remark for remark in remarks if "left out" in remark]
    assert remark.startswith(f"{large} is left out: 64 rows of 90 + 8 tokens: does not fit.")
    with pytest.raises(OutOfMemory, match=f"{large} is left out: 64 rows"):
        benchmark(tiny, text, [large], repeats=1)


def test_recipes_that_do_not_fit_beside_each_other_are_refused(tiny, monkeypatch, no_work):
    text, recipes = "tiny/b64/p90/n8", ["baseline", NO_PADS, FAST]
    holds(monkeypatch, tiny, max(needs(tiny, words, text) for words in recipes) + 1)
    with pytest.raises(OutOfMemory, match="side by side, and the check of the output take .* Give fewer recipes"):
        benchmark(tiny, text, recipes)


@pytest.mark.parametrize("recipes", [["baseline", NO_PADS, FAST], ["int8_weights"]])
def test_a_benchmark_takes_what_was_forecast(recipes, monkeypatch):
    model = load("demo", device="cpu")
    streaming_gb_per_s("cpu")  # its buffer is needed once in a process: now
    told = []
    monkeypatch.setattr(
        fit, "benchmark_peak", lambda *given, most=fit.benchmark_peak: told.append(most(*given)) or told[-1]
    )
    monkeypatch.setattr(import_module("eet_lab.bench.benchmark"), "_quality", lambda *given: [])  # after all is closed
    Engine(model.decoder, Recipe.parse(recipes[-1]).parts)  # makes int8 weights, which stay
    with Counted() as counted:
        benchmark(model, "demo/b8/p40/n4", recipes, repeats=1)
    assert 0.95 * counted.peak_bytes <= told[0] <= 1.05 * counted.peak_bytes


@pytest.mark.parametrize("problem", [OutOfMemory("The text does not fit."), Cancelled("Stopped."), ValueError("Odd.")])
def test_what_was_timed_outlives_the_perplexities(tiny, monkeypatch, problem):
    def fails(model, recipe, cancel):
        if "head" in str(recipe):
            raise problem

    monkeypatch.setattr(import_module("eet_lab.bench.benchmark"), "held_out_perplexity", fails)
    monkeypatch.setattr(import_module("eet_lab.bench.benchmark"), "perplexities", lambda before, after: "as before")
    recipes = ["int8_weights:head=False", "int8_weights"]
    rows, remarks = benchmark(tiny, "tiny/b1/p4/n4", recipes, repeats=1)
    assert [row.recipe for row in rows] == recipes
    assert [f"{recipes[0]}: perplexity is not told. {problem}", f"{recipes[1]}: as before"] == remarks[:2]


def test_nothing_of_what_was_timed_is_there_when_perplexities_are_read(tiny, monkeypatch):
    alive, made = [], peers.make

    def noted(*given):
        found, absent = made(*given)
        alive.extend(map(weakref.ref, found))
        return found, absent

    def looks(*given):
        gc.collect()
        assert len(alive) == 1 and alive[0]() is None
        return []

    monkeypatch.setattr(peers, "make", noted)
    monkeypatch.setattr(import_module("eet_lab.bench.benchmark"), "_quality", looks)
    assert len(benchmark(tiny, "tiny/b1/p4/n4", ["int8_weights"], ["eet_lab", "hf-sdpa"], repeats=1)[0]) == 2


@dataclass
class Unhashable:
    """A part as a user may write it: equal to others, and so without a hash."""

    part: Callable

    def __call__(self, *args, **keywords):
        return self.part(*args, **keywords)


def embedding(part: Callable) -> Recipe:
    """A recipe with a user's own embedding."""

    @dataclass(frozen=True)
    class Own(Technique):
        """An embedding of a user's own."""

        name: ClassVar[str] = "own"
        title: ClassVar[str] = "Own"

        def apply(self, parts: Parts) -> Parts:
            return replace(parts, ops=replace(parts.ops, embed=part))

    return Recipe((Own(),))


def test_parts_without_a_hash_are_timed_and_counted(tiny):
    [row, plain], remarks = benchmark(
        tiny, "tiny/b1/p4/n4", [embedding(Unhashable(reference.embed)), "baseline"], repeats=1
    )
    assert row.launches_per_token == plain.launches_per_token > 0
    assert not [remark for remark in remarks if "counted" in remark]


def test_the_lower_bound_is_that_of_what_was_timed(tiny, monkeypatch):
    """Launches are counted in a run of other lengths."""

    def counted(provider):
        provider.subject.engine.generate([[1]], Settings(2))

    monkeypatch.setattr(RecipeProvider, "_launches", counted)
    [row], _ = benchmark(tiny, "tiny/b3/p20/n4", [FAST], repeats=1)
    passes = Engine(tiny.decoder, Recipe.parse(FAST).parts).lifetimes([[1] * 20] * 3, Settings(4)).values()
    assert row.lower_bound_bytes == max(max(live_bytes(each)) for each in passes)


def test_calls_that_cannot_be_counted_lose_no_row(tiny):
    def of_real_sizes(ids, positions, words, places, *, empty):
        if words.shape[1] != tiny.config.hidden_size:
            raise ValueError("too few channels")
        return reference.embed(ids, positions, words, places, empty=empty)

    [row], remarks = benchmark(tiny, "tiny/b1/p4/n4", [embedding(of_real_sizes)], repeats=1)
    assert row.launches_per_token is None
    assert row.tpot_ms is not None
    assert any("could not be counted" in remark and "too few channels" in remark for remark in remarks)


def test_weights_of_what_cannot_run_are_not_drawn(monkeypatch, capsys):
    def shapes_only(name, *, device=None, given=models.load, **options):
        assert device == "meta", "weights were drawn"
        return given(name, device=device, **options)

    monkeypatch.setattr(models, "load", shapes_only)
    monkeypatch.setattr(fit, "free_bytes_of", lambda device: 2**34)
    assert main(["bench", "gpt2-xl/b512/p960/n64", "--device", "cpu"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "512 rows of 960 + 64 tokens: does not fit." in line
    assert "Would fit: " in line


def test_reading_what_the_baseline_says_tells_how_far_it_is(tiny):
    told = []
    benchmark(tiny, "tiny/b2/p4/n40", "baseline", repeats=1, progress=lambda *given: told.append(given[2]))
    said = [message for message in told if message.startswith("reading what the baseline says, ")]
    assert said[0].endswith("2 prompts")
    assert "reading what the baseline says, step 6 of 43" in said, "a row that is padded has its steps later"
    assert said[-1].endswith("at higher precision")
    assert len(said) <= 12


def no_weights(*given, **options):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")


@pytest.mark.parametrize("fails", ["eet_lab.bench.peers.to_hf", "eet_lab.bench.peers.HuggingFace.prepare"])
def test_runs_of_who_is_left_out_are_not_counted(tiny, monkeypatch, fails):
    """The last unit begins with one that is left."""
    monkeypatch.setattr(fails, memory_for("a buffer of transformers")(no_weights))
    told, named = [], ["eet_lab", "hf-eager", "hf-sdpa"]

    def progress(done, total, message):
        told.append((total - done, message))

    rows, remarks = benchmark(tiny, "tiny/b2/p4/n2", "baseline", named, repeats=3, progress=progress)
    assert len(rows) == 1 and sum("hf-" in remark for remark in remarks) == 2
    assert told[-1] == (1, "timing baseline, 3 of 3")


def test_the_pass_at_higher_precision_can_be_stopped(tiny):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        reference_logits(tiny.decoder, [[1, 2]], [[3]], 1, stop)


def test_a_workload_of_another_model_is_refused(no_work):
    model = load("demo", device="cpu")
    with pytest.raises(PromptError, match="a workload of 'gpt2', but the model is 'demo'.* name demo/b1/p4/n4"):
        benchmark(model, Workload.parse("gpt2/b1/p4/n4"), repeats=1)


def test_a_workload_and_a_recipe_can_be_given_as_text():
    rows, _ = benchmark(load("demo", device="cpu"), "demo/b1/p4/n4", "pre_padding", "eet_lab", repeats=1)
    assert [(row.workload, row.recipe) for row in rows] == [("demo/b1/p4/n4", "pre_padding")]


def test_the_same_recipe_in_other_words_is_timed_once(tiny):
    words = ["mask_removal,pre_padding", "pre_padding,mask_removal", "baseline"]
    rows, remarks = benchmark(tiny, "tiny/b1/p4/n4", words, repeats=1)
    assert [row.recipe for row in rows] == [NO_PADS, "baseline"]
    told = f"{NO_PADS} was given 2 times, as '{words[0]}' and '{words[1]}': it is timed once."
    assert told in remarks
    assert distinct("all", "cpu")[1] == []


@pytest.mark.parametrize(
    ("recipes", "providers", "says"),
    [
        ([], ["eet_lab", "hf-sdpa"], r"No recipe is given. Name one, such as 'all', or leave eet_lab out"),
        ("all", [], "No provider is named. Known ones: eet_lab, hf-eager, hf-sdpa"),
        ("all", ["hf-max-autotune"], "on a GPU only. Add eet_lab, or another of hf-eager"),
    ],
)
def test_nobody_to_time_is_told(tiny, recipes, providers, says):
    with pytest.raises(PromptError, match=says):
        benchmark(tiny, "tiny/b1/p4/n4", recipes, providers)
