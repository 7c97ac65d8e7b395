"""The forecast of a comparison, against what it takes."""

from __future__ import annotations

import pytest
from counted import Counted

from eet_lab.bench import compare, fit, held_out
from eet_lab.bench.cost import streaming_gb_per_s
from eet_lab.engine.settings import Settings
from eet_lab.models import load
from eet_lab.technique import Recipe


@pytest.fixture
def one_batch_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Perplexity is told of one batch of windows and a short one, which take as much memory as all of them."""
    whole, tokens = held_out.held_out, held_out.BATCH * held_out.WINDOW + 300
    monkeypatch.setattr(held_out, "held_out", lambda model: whole(model)[:tokens])


@pytest.mark.usefixtures("one_batch_held_out")
@pytest.mark.parametrize(
    ("words", "lengths", "num_new", "above"),
    [
        ("pre_padding,mask_removal,memory_reuse,packed_prefill", [30, 7], 16, 1.02),
        ("memory_reuse:kv=paged", [40] * 4, 12, 1.02),
        ("pre_padding", [100] * 3, 4, 1.3),  # what stays of fresh tensors is overrated
        ("int8_weights", [20, 9], 4, 1.3),
    ],
)
def test_a_comparison_takes_what_was_forecast(
    monkeypatch: pytest.MonkeyPatch, words: str, lengths: list[int], num_new: int, above: float
) -> None:
    model = load("demo", device="cpu")
    streaming_gb_per_s("cpu")  # its buffer is needed once in a process: now
    monkeypatch.setitem(fit.NUM_BYTES, "cpu", 0)
    told = fit.forecast_compare(model, lengths, Recipe.parse(words), Settings(num_new))
    with Counted() as counted:
        compare(model, [[1] * length for length in lengths], words, repeats=1, watch=False, max_new_tokens=num_new)
    taken = model.decoder.weight_bytes + counted.peak_bytes
    assert 0.995 * taken <= told.total_bytes <= above * taken


def test_the_first_comparison_of_a_process_measures_how_fast_memory_is() -> None:
    model = load("demo", device="cpu")
    told = fit.forecast_compare(model, [5], Recipe.parse("memory_reuse"), Settings(4))
    assert told.check_bytes == fit.NUM_BYTES["cpu"]
    assert told.total_bytes > told.check_bytes + model.decoder.weight_bytes
