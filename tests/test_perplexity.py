"""Perplexity: Hugging Face's loss, every token once, shown where it means something and nowhere else."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eet_lab.bench import compare, ladder, load_result, perplexity
from eet_lab.bench.held_out import held_out, why_not, windows
from eet_lab.errors import Cancelled, ModelError, PromptError
from eet_lab.models import load
from eet_lab.models.config import PRESETS, Config
from eet_lab.models.loading import DEMO
from eet_lab.progress import Cancel


@pytest.fixture(scope="module")
def demo():
    return load("demo", device="cpu")


@pytest.fixture
def random(monkeypatch):
    monkeypatch.setitem(PRESETS, "smoke", Config(2, 32, 2, 64, 97, 64))
    return load("smoke", device="cpu")


def hf_nats(model, rows) -> float:
    """The loss that transformers computes, per predicted token."""
    with torch.inference_mode():
        losses = [model(torch.tensor([row]), labels=torch.tensor([row])).loss.item() * (len(row) - 1) for row in rows]
    return sum(losses) / sum(len(row) - 1 for row in rows)


def test_the_baseline_has_the_loss_of_transformers(demo):
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(DEMO, dtype=torch.float32).eval()
    ids = held_out(demo)[:700]
    found = perplexity(demo, text=ids, window=256)
    assert found.nats == pytest.approx(hf_nats(model, [ids[i : i + 256] for i in range(0, 700, 256)]), abs=1e-4)
    assert found.num_tokens == 700 - 3
    assert found.value == pytest.approx(math.exp(found.nats))


@pytest.mark.parametrize("recipe", ["pre_padding", "mask_removal", "all"])
def test_a_recipe_that_is_not_lossy_changes_nothing(tiny, recipe):
    ids = list(range(1, 300, 2))
    assert perplexity(tiny, recipe, ids).nats == pytest.approx(perplexity(tiny, "", ids).nats, abs=1e-5)


def test_more_context_predicts_better(demo):
    ids = held_out(demo)[:600]
    apart, overlapping = (perplexity(demo, text=ids, window=64, stride=stride) for stride in (64, 16))
    assert overlapping.nats < apart.nats - 0.1
    assert overlapping.num_tokens == 599


@given(num=st.integers(2, 200), window=st.integers(2, 60), data=st.data())
def test_every_token_is_scored_once(num, window, data):
    stride = data.draw(st.integers(1, window))
    ids, begin, scored = list(range(num)), 0, list[int]()
    for each in windows(ids, window, stride):
        assert 2 <= len(each.ids) <= window
        assert 1 <= each.first < len(each.ids)
        assert each.ids == ids[each.ids[0] : each.ids[-1] + 1]
        begin += stride
        scored += each.ids[each.first :]
    assert len(set(scored)) == len(scored)
    context_only = {i for i in range(0, num, stride)} if stride == window else {0}
    assert set(ids) - set(scored) <= context_only


def test_what_cannot_be_told_is_refused(tiny, random, demo):
    with pytest.raises(ModelError, match="weights of smoke are random"):
        perplexity(random)
    with pytest.raises(ModelError, match="came without a tokenizer"):
        perplexity(tiny)
    for ids, says in (([5], "The text has 1 token, but .* give at least two"), ([], "The text has 0 tokens, but")):
        with pytest.raises(PromptError, match=says):
            perplexity(demo, text=ids)
    with pytest.raises(PromptError, match="window is 5000"):
        perplexity(demo, text=[5, 6], window=5000)
    with pytest.raises(PromptError, match="stride is 9.*leave no gap"):
        perplexity(demo, text=[5, 6], window=8, stride=9)


def test_reading_can_be_stopped(demo):
    class Pressed(Cancel):
        def is_set(self) -> bool:
            return True

    with pytest.raises(Cancelled):
        perplexity(demo, text="Return a list of all items.", cancel=Pressed())


def test_the_bundled_text_is_held_out(demo):
    ids = held_out(demo)
    assert 7_000 < len(ids) < 10_000
    assert ids.count(demo.config.eos_id) == len((DEMO / "heldout.jsonl").read_text().splitlines())


@pytest.fixture(scope="module")
def short(demo):
    """The demo model, with a text of a few lines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[held_out.__module__], "held_out", lambda model: held_out(model)[:300])
        yield demo


def test_compare_shows_it_beside_the_speed(short, tmp_path):
    result = compare(short, ["Return"], "int8_weights", repeats=1, watch=False, max_new_tokens=2)
    before, after = result.baseline.perplexity, result.selection.perplexity
    assert before.nats != after.nats
    assert after.nats == pytest.approx(before.nats, rel=0.02)
    assert f"Perplexity {before.value:.2f} -> {after.value:.2f}" in result.to_text()
    assert result.parity.verdict == "lossy"
    assert result.to_frame().loc["selection", "perplexity"] == pytest.approx(after.value)
    assert load_result(result.save(tmp_path / "r.json")) == result


def test_a_ladder_shows_it_too(short):
    found = ladder(short, ["Return"], "pre_padding,int8_weights", repeats=1, max_new_tokens=2)
    told = [rung.measurement.perplexity for rung in found.rungs]
    assert told[1] is None
    assert told[0].nats != told[2].nats
    assert f"Perplexity {told[0].value:.2f} -> {told[2].value:.2f}" in found.to_text()


def test_for_random_weights_the_reason_is_shown_instead(random):
    assert why_not(random, [1, 2]) is not None
    result = compare(random, [[1, 2]], "int8_weights", repeats=1, watch=False, max_new_tokens=2)
    assert result.selection.perplexity.nats is None
    assert "Perplexity is not shown: the weights of smoke are random" in result.to_text()
    assert "perplexity" not in [row.split("  ")[0] for row in result.to_text().splitlines()]


def test_where_nothing_is_lossy_it_is_not_asked_for(tiny):
    result = compare(tiny, [[1, 2]], "pre_padding", repeats=1, watch=False, max_new_tokens=2)
    assert result.baseline.perplexity is None
    assert "erplexity" not in result.to_text()
