"""Workloads of training: their names, and steps of ours beside those of transformers."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import encoders
import families
import pytest
import seq2seqs
import test_vision
import torch

from eet_lab.bench import run_memory, train_compare, training
from eet_lab.bench.cost import train_flops
from eet_lab.bench.gradients import Fp32Reference, by_checkpoint_names, checkpoint_names, largest
from eet_lab.bench.rows import append, markdown, read
from eet_lab.bench.timing import LeftOut
from eet_lab.bench.train_compare import BUDGETS, COMPARED, compare_training, ladder_training, largest_difference
from eet_lab.bench.training import train_all
from eet_lab.bench.workloads import TrainBatch, parse
from eet_lab.commands.bench_tables import train_table
from eet_lab.errors import Cancelled, ModelError, OutOfMemory, PromptError, RecipeError
from eet_lab.figures import plot
from eet_lab.models import load
from eet_lab.models.config import PRESETS
from eet_lab.models.weights import state_of
from eet_lab.technique import Recipe
from eet_lab.training import Rows, Trainer, TrainSettings
from eet_lab.training.step import Work

PROVIDERS = ("eet_lab", "hf-eager", "hf-sdpa")


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """Runs have two steps, where times need ten."""
    monkeypatch.setattr(training, "STEPS", 2)


def test_names_and_workloads_are_inverse():
    for name in ("train:gpt2/b8/s1024", "train:vit-b-32/b128", "train:some/folder/b1/s7-30/d0.1"):
        [workload] = parse(name)
        assert str(workload) == name and isinstance(workload, TrainBatch)
    assert TrainBatch.parse("train:gpt2/b3/s4-10").lengths(1024) == (4, 7, 10)
    assert TrainBatch.parse("train:gpt2/b2").lengths(1024) == (1024, 1024)
    for wrong in ("gpt2/b0", "gpt2/b2/s0", "gpt2/b2/s9-3", "gpt2/b2/-9", "gpt2", "gpt2/b99999999/s500", "gpt2/b2/d1"):
        with pytest.raises(PromptError):
            TrainBatch.parse("train:" + wrong)


@pytest.mark.parametrize(
    ("model", "workload"),
    [
        (lambda: families.ours("gpt2"), "train:any/b3/s4-9/d0.1"),
        (lambda: families.ours("llama"), "train:any/b2/s8"),
        (lambda: encoders.ours("bert-classes"), "train:any/b3/s5-20"),
        (lambda: test_vision.ours("classes"), "train:any/b3"),
        (lambda: seq2seqs.ours("t5"), "train:any/b3/s2-9"),
        (lambda: seq2seqs.ours("marian"), "train:any/b2/s7"),
    ],
)
def test_ours_and_transformers_take_the_same_steps(model, workload, tmp_path, capfd):
    rows, remarks = train_all(model(), workload, ("baseline", "all"), PROVIDERS, repeats=1)
    assert [row.provider for row in rows] == ["eet_lab", "eet_lab", "hf-eager", "hf-sdpa"] and remarks == []
    assert [row.equality for row in rows] == ["passed"] * 4
    assert all(0 < row.mfu < 1.5 and row.ceiling_tflops > 0 for row in rows) and "MFU" in train_table(rows)
    assert len({round(row.tok_s * row.total_ms.p50) for row in rows}) == 1, "of the same tokens"
    [path] = append(rows, tmp_path)
    assert "Loading weights" not in capfd.readouterr().err, "it would stand in our own progress"
    assert read(path) == rows and "ms a step" in markdown(rows) and "hf-sdpa" in train_table(rows)


def test_what_a_side_holds_is_taken_once_its_graphs_are_there(monkeypatch):
    """A replay allocates nothing, so a peak of replays alone has none of the activations: all of the step's memory."""
    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100 if done == ["waited", "emptied"] else 0)
    segments = [{"segment_pool_id": pool, "total_size": 64, "allocated_size": 24} for pool in ((0, 0), (0, 1), (0, 1))]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert run_memory.allocated("cuda") == 180 and run_memory.allocated("cpu") == 0
    taken, step, model = [], Trainer._step, families.ours("gpt2")
    monkeypatch.setattr(Trainer, "_step", lambda *given: taken.append(1) or step(*given))
    monkeypatch.setattr(training, "allocated", lambda device: len(taken))
    batch = training.Batch.of(TrainBatch.parse("train:any/b2/s8"), model)
    exact = Fp32Reference(batch.network, batch.examples)
    held = training._ours(batch, exact, Recipe.parse("pre_padding")).held_bytes
    assert held >= 2, "the first step is not captured"


def test_peers_without_a_gpu_are_left_out(monkeypatch):
    monkeypatch.setattr(training, "_to_hf_in_training", lambda *_, **__: pytest.fail("its weights are copied"))
    rows, remarks = train_all(families.ours("llama"), "train:any/b2/s8", (), ("hf-liger", "hf-reduce-overhead"))
    assert rows == []
    assert "Liger needs an NVIDIA GPU" in remarks[0] and "reduce-overhead needs an NVIDIA GPU" in remarks[1]


def test_steps_of_who_is_left_out_are_not_counted():
    told = []

    def progress(done, total, message):
        told.append((total - done, message))

    named = ("eet_lab", "hf-liger", "hf-reduce-overhead")
    rows, remarks = train_all(
        families.ours("llama"), "train:any/b2/s8", "baseline", named, repeats=3, progress=progress
    )
    assert len(rows) == 1 and len(remarks) == 2
    assert told[-1] == (1, "timing baseline, 3 of 3")


def test_a_model_that_is_compiled_in_parts_is_told(monkeypatch):
    counters = {"stats": {"unique_graphs": 3}, "graph_break": {"a reason\n  and more": 2}}
    monkeypatch.setattr("torch._dynamo.utils.counters", counters)
    assert training._in_parts("hf-compile") == "hf-compile was not compiled as a whole: 2 graph breaks, a reason."
    counters["graph_break"].clear()
    assert training._in_parts("hf-compile") == ""
    counters["stats"]["unique_graphs"] = 0
    with pytest.raises(LeftOut, match="compiled nothing"):
        training._in_parts("hf-compile")


def test_what_liger_replaces_for_all_models_is_put_back(monkeypatch):
    module = ModuleType("modeling_fake")
    module.rotate, model = "plain", type("Fake", (), {"__module__": "modeling_fake"})()
    model.device, model.config = torch.device("cuda"), SimpleNamespace(model_type="fake")
    apply = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"fake": lambda model: setattr(module, "rotate", "liger")})
    monkeypatch.setitem(sys.modules, "modeling_fake", module)
    monkeypatch.setattr(training, "import_module", lambda name: apply)
    patched = training._with_liger(model)
    assert module.rotate == "plain"
    with patched():
        assert module.rotate == "liger"
    assert module.rotate == "plain"
    model.config.model_type = "gpt2"
    with pytest.raises(LeftOut, match="no kernels for gpt2"):
        training._with_liger(model)


def test_a_window_is_no_more_arithmetic_than_it_shows():
    gpt2 = PRESETS["gpt2"]
    work = Work(((1024, 0),) * 8, 8 * 1023, 768 * 50257)
    linears, head = 8192 * 12 * 12 * 768**2, 8 * 1023 * 768 * 50257
    assert train_flops(gpt2, work) == 6 * (linears + head + 8 * 12 * 768 * 1024 * 1025)
    assert train_flops(replace(gpt2, window=1), Work(((5, 0),), 0, 0)) == 6 * (5 * 12 * 12 * 768**2 + 12 * 2 * 768 * 5)


def test_another_gradient_is_told(monkeypatch):
    def wrong(network, dropout, **how):
        model = to_hf(network, dropout, **how)
        with torch.no_grad():
            model.transformer.h[1].mlp.c_fc.weight[0, 0] += 1.0
        return model

    to_hf = training._to_hf_in_training
    monkeypatch.setattr(training, "_to_hf_in_training", wrong)
    rows, _ = train_all(families.ours("gpt2"), "train:any/b2/s8", (), "hf-sdpa", repeats=1)
    assert "off by" in rows[0].equality and "the budget is" in rows[0].equality


@pytest.fixture(scope="module")
def exact() -> tuple[Fp32Reference, dict]:
    """What is right for a batch of GPT-2, and its gradient."""
    batch = training.Batch.of(TrainBatch.parse("train:any/b2/s8"), families.ours("gpt2"))
    found = Fp32Reference(batch.network, batch.examples)
    return found, by_checkpoint_names(trainer := Trainer(batch.network), trainer.gradients(batch.examples)[1])


def test_another_gradient_of_the_same_norm_is_told(exact):
    right, grads = exact
    assert right.errors(right.loss, grads).verdict(right.budget) == "passed"
    turned = grads | {"transformer.h.0.mlp.c_fc.weight": -grads["transformer.h.0.mlp.c_fc.weight"]}
    off = right.errors(right.loss, turned)
    assert off.loss == 0 and off.verdict(right.budget).startswith("gradient off by 0.")
    assert right.errors(right.loss * 1.01, grads).verdict(right.budget).startswith("loss off by 0.01")
    lacking = {name: grad for name, grad in grads.items() if name != "transformer.wte.weight"}
    assert 0.1 < right.errors(right.loss, lacking).gradient <= 1
    assert right.errors(right.loss, {}).gradient == 1


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_not_finite_passes_nowhere(wrong, exact):
    right, grads = exact
    name, grad = next(iter(grads.items()))
    broken = grads | {name: grad.index_fill(0, torch.tensor([0]), wrong)}
    for off in (right.errors(wrong, grads), right.errors(right.loss, broken)):
        assert math.inf in off and off.verdict(right.budget) != "passed" != off.verdict(off)
    assert largest([]) == 0 and largest([0.5, wrong]) == math.inf


def test_in_16_bits_the_budget_is_what_plain_pytorch_loses():
    model = load(families.theirs("gpt2"), dtype="bfloat16", device="cpu")
    batch = training.Batch.of(TrainBatch.parse("train:any/b2/s8"), model)
    right = Fp32Reference(batch.network, batch.examples)
    off = right.errors_of(Trainer(batch.network), batch.examples)
    assert right.budget.gradient == pytest.approx(2 * off.gradient, rel=0.05) and off.gradient > 1e-3
    assert right.budget.loss >= 2**-8 and off.verdict(right.budget) == "passed"


def test_parameters_that_a_version_calls_otherwise_are_found_by_their_numbers():
    state = state_of(families.ours("gpt2").network)
    named = {f"other.{name}" if ".mlp." in name else name: tensor.clone() for name, tensor in state.items()}
    model = SimpleNamespace(named_parameters=named.items)
    found = checkpoint_names(model, state)
    assert found == {name: name.removeprefix("other.") for name in named} and set(found.values()) == state.keys()


def test_what_cannot_be_trained_is_told():
    with pytest.raises(PromptError, match="no provider 'hf-sdp' of training. Did you mean 'hf-sdpa'"):
        train_all(families.ours("gpt2"), "train:any/b2/s8", providers="hf-sdp")
    with pytest.raises(PromptError, match="rows of 5,000 tokens, but the model's context is"):
        train_all(families.ours("gpt2"), "train:any/b2/s5000")
    with pytest.raises(PromptError, match="at most 10,000,000. Take fewer rows, or name shorter ones"):
        train_all(seq2seqs.ours("t5"), "train:any/b8")
    with pytest.raises(PromptError, match="all images have 10 tokens"):
        train_all(test_vision.ours("classes"), "train:any/b2/s5")
    with pytest.raises(ModelError, match="no classification head"):
        train_all(encoders.ours("bert"), "train:any/b2/s5")


def test_two_recipes_take_the_same_steps_in_turn():
    rows, partial, model = Rows(list(range(5, 95)), 9), [], families.ours("gpt2")
    how = {"batch_rows": 2, "repeats": 6}
    found = compare_training(model, rows, "all", on_partial=partial.append, **how)
    assert found.verdict in ("identical", "within rounding") and found.change.num_pairs == 6
    assert [step.number for step in found.selection.steps] == [*range(8)] and len(partial) == 5
    assert partial[0].change.num_pairs == 1 and found.baseline.recipe == "baseline"
    drawn = plot(found)
    assert [len(line.x) for line in drawn.data] == [8, 8] and drawn.data[0].name == "baseline"
    assert drawn.layout.title.text.startswith("Same loss curve?")
    frame = found.to_frame()
    assert [*frame.index] == ["baseline", "selection"] and frame.loc["selection", "recipe"] == found.selection.recipe
    assert frame.loc["baseline", "loss"] == found.baseline.losses[-1] and frame.loc["baseline", "repeats"] == 6
    assert frame.step_ms.tolist() == pytest.approx([found.change.before, found.change.after], abs=1e-3)
    same = compare_training(model, rows, "", **how)
    assert same.verdict == "identical" and same.max_error == 0 and "to the bit" in same.explanation
    assert same.baseline.losses == found.baseline.losses
    shown = found._repr_html_()
    assert (
        "Same loss curve? " in shown
        and found.verdict.capitalize() in shown
        and "A step: " in shown
        and len(shown) < 3000
    )
    off = replace(found, selection=replace(found.selection, steps=found.selection.steps[:1]), max_error=0.5)
    assert off.verdict == "different" and "0.5 apart, as a share" in off.explanation
    lost = replace(off, max_error=math.inf)
    assert lost.verdict == "different" and "not finite" in lost.explanation
    with pytest.raises(RecipeError, match="memory_reuse"):
        compare_training(model, rows, "memory_reuse", **how)


def test_losses_near_zero_and_late_ones_are_not_called_different():
    """Logits are as exact where their loss is small, and steps grow apart by rounding."""
    slow, budget = [5.0, *[0.4] * 30], BUDGETS[torch.float32]
    near_zero = [*slow[:10], *[9e-5] * 21], [*slow[:10], *[8.9e-5] * 21]
    late = slow, [*slow[:COMPARED], *[0.41] * 11]
    wrong = slow, [5.0, *[0.41] * 30]
    errors = [largest_difference(*losses) for losses in (near_zero, late, wrong)]
    assert errors[0] < errors[1] + budget < errors[2] == pytest.approx(0.01)
    assert largest_difference(slow, [*slow[:-1], math.nan]) == math.inf


def test_a_text_that_is_learned_by_heart_keeps_its_verdict():
    model = families.ours("gpt2")
    rows, settings = Rows([5, 6, 7, 8] * 9, 4), TrainSettings(lr=3e-2)
    found = compare_training(model, rows, "all", batch_rows=2, repeats=60, settings=settings)
    assert found.baseline.losses[-1] < 0.01 and found.verdict in ("identical", "within rounding"), found.explanation


def test_a_ladder_of_training_credits_each_technique_and_stops_with_what_it_has(monkeypatch):
    rows, partial, model = Rows(list(range(5, 95)), 9), [], families.ours("gpt2")
    recipe, stop = "pre_padding,mask_removal,packed_prefill", threading.Event()
    found = ladder_training(model, rows, recipe, batch_rows=2, repeats=6, on_partial=partial.append)
    assert [rung.technique for rung in found.rungs] == recipe.split(",") and len(partial) == 5
    assert all(rung.technique in found._repr_html_() for rung in found.rungs)
    assert [(rung.technique, rung.along) for rung in found.left_out] == [
        ("pre_padding", ("packed_prefill",)), ("mask_removal", ("packed_prefill",)), ("packed_prefill", ())
    ]  # fmt: skip
    for before, rung in pairwise(found.rungs):
        assert rung.found.baseline == before.found.selection and rung.found.change.num_pairs == 6
    assert found.whole.baseline == found.rungs[0].found.baseline and found.whole.selection.recipe == found.recipe
    assert {rung.found.verdict for rung in (*found.rungs, *found.left_out)} <= {"identical", "within rounding"}
    assert all(rung.found.baseline == found.whole.selection for rung in found.left_out) and not found.partial
    frame = found.to_frame()
    names = [("added", name) for name in ("baseline", *recipe.split(","))]
    assert [*frame.index] == names + [("left out", name) for name in recipe.split(",")]
    steps, own = frame.step_ms.tolist(), frame.delta_ms.tolist()
    assert math.isnan(own[0]) and own[1:4] == pytest.approx([b - a for a, b in pairwise(steps[:4])], abs=1e-3)
    assert frame.loc[("left out", "pre_padding"), "along"] == "packed_prefill"

    def stops(so_far):
        stop.set()

    stopped = ladder_training(model, rows, recipe, batch_rows=2, repeats=6, on_partial=stops, cancel=stop)
    assert stopped.partial and stopped.whole.change.num_pairs == 1 and len(stopped.rungs) == 3
    with pytest.raises(Cancelled):
        ladder_training(model, rows, recipe, batch_rows=2, cancel=stop)
    with pytest.raises(RecipeError, match="needs a technique at least"):
        ladder_training(model, rows, "")
    figure = plot(found)
    assert list(figure.layout.yaxis.ticktext)[1:4] == [rung.title for rung in found.rungs]

    def full(*given, **how):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(train_compare, "Trainer", full)
    with pytest.raises(OutOfMemory, match="what a recipe trains could not be allocated.*ladder fewer techniques"):
        ladder_training(model, rows, recipe)
