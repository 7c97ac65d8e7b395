"""Lesson 3's views: what is said of pages follows from the counted bytes, and a forecast is called one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from eet_lab.lessons import memory_views as views
from eet_lab.lessons.batch import SHORT, rows
from eet_lab.models.tokenizer import Tokenizer
from eet_lab.parts.paged_kv import PAGE


@pytest.fixture
def words(tiny: Any) -> Any:
    """The tiny model with a tokenizer of sorts: each word is a token."""

    def encode(text: str) -> list[int]:
        return [1 + sum(word.encode()) % 480 for word in text.split()]

    return replace(tiny, tokenizer=Tokenizer(encode, lambda ids, **options: " ".join(map(str, ids)), 499))


def test_what_pages_waste_is_at_both_ends_of_a_row(words: Any) -> None:
    new_tokens = 9
    found = views._watched(words, rows(words), views.CACHES["paged"], new_tokens)
    lengths = [len(row) for row in rows(words)]
    pads, max_kv = [max(lengths) - each for each in lengths], max(lengths) + new_tokens - 1
    column_bytes = words.config.kv_bytes_per_token(words.decoder.dtype.itemsize)
    assert found.before_bytes == column_bytes * sum(pad % PAGE for pad in pads) > 0
    assert found.after_bytes == column_bytes * len(pads) * (-max_kv % PAGE) > 0
    assert found.taken[-1] * views.MiB == pytest.approx(found.use.used_bytes + found.before_bytes + found.after_bytes)


def test_pages_are_told_with_what_was_counted(words: Any) -> None:
    paged = views._watched(words, rows(words), views.CACHES["paged"], 9)
    [*_, told, short] = views.kv_caches(words, 9).things
    for num_bytes in (paged.before_bytes, paged.after_bytes, paged.use.held_bytes):
        assert views.sized(num_bytes) in told
    assert "stopped keeps its pages" in told and "first page" in told and "last" in told
    batch = [words.encode(prompt) for prompt in SHORT]
    in_pages, in_a_slab = (
        views._watched(words, batch, views.CACHES[kind], views.SHORT_NEW).use.held_bytes for kind in ("paged", "static")
    )
    assert in_pages > in_a_slab, "a short ragged batch holds more in pages"
    assert views.sized(in_pages) in short and views.sized(in_a_slab) in short


def test_a_forecast_says_what_it_is_for(words: Any) -> None:
    where, *told = views.forecast(words).things
    assert "Measured" not in where.data and "GPU with 24 GiB free" in where.data and "forecast" in where.data.lower()
    assert all(re.search(r"24 GiB", each.data) for each in told if not isinstance(each, str))
    assert "workspace" in told[-1] and "cuBLAS" in told[-1]


def test_without_a_gpu_the_lines_of_a_recorded_one_are_shown(words: Any) -> None:
    _, _, _, where, fig, told = views.three_lines(words).things
    assert "Not this machine" in where.data and "H200" in where.data
    plan, allocated, reserved, device = (trace.y for trace in fig.data)
    assert len(plan) > 50
    for counters in zip(plan, allocated, reserved, device, strict=True):
        assert list(counters) == sorted(counters), "each counter sees what the one before it sees"
    result, _ = views.recorded.watched()
    assert min(plan) * views.GiB > result.baseline.memory["weights"], "the plan has the weights, too"
    grew, others_grew = plan[-1] - plan[0], reserved[-1] - reserved[0]
    assert views.sized(grew * views.GiB)[:3] in told and allocated[-1] - allocated[0] == pytest.approx(grew, rel=0.1)
    assert device[-1] - device[0] == pytest.approx(others_grew, rel=0.01)
    assert 0 < others_grew < grew and f"reserved bytes and the device's by only {others_grew * 1024:.0f} MiB" in told
    other = sum(result.selection.memory[name] for name in ("kv", "activations"))
    apart = (allocated[0] - plan[0]) * views.GiB
    assert apart / 2 < other < apart, "most of the gap is the other engine of the Compare"
    assert f"{apart / views.MiB:.0f} MiB apart" in told and views.sized(other) in told
