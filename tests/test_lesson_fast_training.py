"""Lesson 8: its counts are right, its comparisons compute the same, and its exercises explain."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from eet_lab.lessons import fast_training as lesson
from eet_lab.lessons import training_exercises as exercises
from eet_lab.lessons.pre_padding import padded_share
from eet_lab.lessons.prediction import Prediction
from eet_lab.models import Model, load
from eet_lab.training import demos
from eet_lab.words import percent


@pytest.fixture(scope="module")
def model() -> Model:
    torch.set_num_threads(1)
    return lesson.untrained("cpu")


def guessed(model: Model) -> Prediction:
    guess = lesson.predict(model)
    guess.value = 50.0
    return guess


def html(thing: Any) -> str:
    return getattr(thing, "data", "") if not hasattr(thing, "to_json") else ""


def test_the_parts_of_a_step_are_told_apart(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lesson, "STEPS", 1)
    parts = lesson.step_parts(model, lesson.BASE)
    flat = lesson.step_parts(model, f"{lesson.BASE},flat_optimizer")
    assert list(parts) == [lesson.FORWARD, lesson.BACKWARD, lesson.UPDATE]
    assert all(part.ms > 0 and part.launches > 0 and part.num_bytes > 0 for part in parts.values())
    assert parts[lesson.BACKWARD].launches > parts[lesson.FORWARD].launches
    tensors = 28
    assert parts[lesson.UPDATE].launches > 5 * tensors > flat[lesson.UPDATE].launches
    assert lesson.unseen(parts) == [] and len(lesson._shares(parts, "", "launches").data[0].y) == 3
    unseen = {name: part._replace(launches=0) for name, part in parts.items()}  # as where the profiler sees no kernel
    assert "launches are left out" in lesson.unseen(unseen)[0]
    assert list(lesson._shares(unseen, "", "launches").data[0].y) == ["time", "bytes in and out"]
    weights = 4 * model.config.num_params
    assert parts[lesson.UPDATE].num_bytes > 7 * weights and flat[lesson.UPDATE].num_bytes > 7 * weights


def test_nothing_of_packing_is_told_before_the_prediction(model: Model) -> None:
    [place] = lesson.packing(lesson.predict(model), model).things
    assert "Predict first" in str(place.outputs)
    sizes = lesson.lengths(model)
    told = lesson.predict(model)._reveal
    assert f"{lesson.NUM_TEXTS * max(sizes):,} tokens, {sum(sizes):,} are real" in told
    assert percent(padded_share(sizes)) in told and 0.2 < padded_share(sizes) < 0.8


def test_packed_texts_are_no_longer_than_they_are(model: Model) -> None:
    sizes = lesson.lengths(model)
    fig, _, table, words = lesson.packing(guessed(model), model).things
    packed = fig.data[-1]
    assert packed.base[-1] + packed.x[-1] == sum(sizes)
    assert f"{max(sizes) * len(sizes):,}</td>" in html(table) and f"{sum(sizes):,}</td>" in html(table)
    assert "Same loss curve? within rounding" in words or "Same loss curve? identical" in words


def test_logits_are_counted_and_chunks_change_nothing(model: Model) -> None:
    table, _, words = lesson.logits(model).things
    assert "1,571 MiB" in html(table) and "393 MiB" in html(table), "8,192 x 50,257 and 2,048 x 50,257 of 4 bytes"
    assert re.search(r"further from the other than [\d.]+ × 10⁻[⁵⁶⁷⁸] of its norm", words)


def test_the_map_is_of_a_workload_with_a_name(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with the model's title, which is a sentence."""
    asked: list[Any] = []
    recorded = lesson.decode(lesson.FusionMap, lesson.recorded.kept("h100-fusion-gpt2"))
    monkeypatch.setattr(lesson, "fusion_map", lambda of, workload: asked.append(workload.of(workload, of)) or recorded)
    assert "no gain to tell" in lesson.fusions(model).things[-1]
    sizes = lesson.lengths(model)
    assert [str(each) for each in asked] == [f"train:gpt2-tiny/b{lesson.NUM_TEXTS}/s{min(sizes)}-{max(sizes)}"]


def test_without_a_gpu_no_numbers_of_one_are_told(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    table, *_ = lesson.on_a_gpu(model).things
    assert "Flat optimizer" in html(table)
    where, fig, said = lesson.recorded_fusions()
    assert "Not this machine: NVIDIA H100" in html(where) and "train:gpt2/b8/s1024, bfloat16" in html(where)
    [gains] = [trace.text for trace in fig.data if trace.type == "scatter"]
    assert len(gains) == 12 and gains[5] == "  update 9.2 ×<br>  step 2.0 ×" and gains[-1] == "  step 1.9 ×"
    assert "from 7,810 to 665 launches, from 96.4 to 27.1 GB that are moved, and from 235 ms to 19.1 ms" in said
    row = replace(lesson.recorded.rows()[0], workload="train:gpt2/b8/s1024")
    monkeypatch.setattr(lesson.recorded, "all_newest", lambda: (row,))
    _, where, times, *_ = lesson.on_a_gpu(model).things
    assert "Not this machine" in html(where) and "train:gpt2/b8/s1024" in html(times)


def test_recorded_steps_stand_workload_by_workload_under_short_names(model: Model) -> None:
    _, where, times, *_ = lesson.on_a_gpu(model).things
    assert "NVIDIA H200" in html(where) and "ranks" not in html(times)
    rows = re.findall(r"<tr><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>", html(times))
    workloads = [workload for workload, _ in rows]
    assert workloads == sorted(workloads) and len(set(workloads)) < len(workloads)
    own = [(workload, who) for workload, who in rows if who.startswith("EET Lab")]
    # What was taken before a technique was there lacks it, and says so.
    whose = {"EET Lab: all", "EET Lab: all - attention of short rows", "EET Lab: baseline"}
    assert {who for _, who in own} == whose
    assert {workload for workload, _ in own} == set(workloads) and ("train:vit-b-32/b128", "EET Lab: all") in own


def test_what_is_trained_is_told_saved_and_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    short = replace(demos.DEMOS["gpt2-tiny"].in_steps(6), held_out=4, read=partial(demos._documentation, 20_000, 32))
    monkeypatch.setitem(demos.DEMOS, "gpt2-tiny", short)
    found = lesson.train("cpu")
    _, fig, words = lesson.learned(found).things
    assert list(fig.data[0].y) == pytest.approx(found.run.losses, rel=1e-3)
    first, last = (found.run.evaluations[place].loss for place in (0, -1))
    assert f"fell from {first:.2f}" in words and f"to {last:.2f}" in words and last < first - 0.5
    [table] = lesson.written(lesson.untrained("cpu"), found).things
    assert html(table).count("<tr>") == 1 + len(lesson.PROMPTS)
    again = load(lesson.saved(found), device="cpu")
    assert again.encode("The built-in function") == found.model.encode("The built-in function")
    assert torch.equal(again.network.token_embedding, found.model.network.token_embedding)


def test_the_update_is_torchs() -> None:
    weight = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1)
    given = (0.5, 0.0, 0.0)
    for step, grad in enumerate((0.2, -0.1, 0.4), 1):
        weight.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
        given = exercises.adamw(given[0], grad, *given[1:], step, 1e-2, 0.1)
        assert given[0] == pytest.approx(float(weight.detach()), rel=1e-9)
