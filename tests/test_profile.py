"""Cost tables that are measured: which passes are timed, where they are kept, and what cannot be."""

from __future__ import annotations

import threading
from dataclasses import replace
from importlib import metadata
from itertools import pairwise

import pytest
from encoders import ours as encoder
from families import ours as decoder

from eet_lab.bench import measured
from eet_lab.engine.engine import Engine
from eet_lab.errors import Cancelled, CostError, PromptError, RecipeError
from eet_lab.scheduling.cost import DecoderCost, EncoderCost, PassSize
from eet_lab.scheduling.policies import ContinuousBatching, TokenBudget
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.traffic import Gamma, Uniform, make_traffic
from eet_lab.serving import profile_passes
from eet_lab.serving.profile import profile

RECIPE = "all,continuous_batching:rows=4:chunk=8:budget=16"
AXES = (0, 1, 12), (1, 2, 4), (4, 16)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("eet_lab.serving.profile.versions", lambda device: measured.versions(device) | {"commit": "c0"})
    return tmp_path / "eet-lab" / "cost"


def test_an_encoder_is_measured_for_each_length_and_batch(cache):
    told = []
    table = profile(encoder("bert"), axes=((4, 16), (1, 2, 3)), repeats=1, progress=lambda *step: told.append(step))
    assert isinstance(table, EncoderCost) and (table.lengths, table.batches) == ((4, 16), (1, 2, 3))
    assert all(ms > 0 for row in table.times for ms in row)
    assert [step[:2] for step in told] == [(done, 6) for done in range(6)] and told[0][2] == "3 x 16 tokens"
    assert table.source.recipe and table.source.dtype == "float32" and table.source.commit == "c0"
    served = simulate_traffic(make_traffic(50, Gamma(100), Uniform(1, 16)), TokenBudget(max_rows=3), table)
    assert served.requests_per_s > 0


def test_what_is_measured_of_a_decoder_is_told_with_nouns_in_their_form(cache):
    told = []
    model = decoder("llama")
    profile(model, RECIPE, axes=((0, 1, 12), (1, 2), (1, 16)), repeats=1, progress=lambda *step: told.append(step[2]))
    assert {"1 row of 1 column", "1 row of 16 columns", "2 rows of 16 columns", "prompts alone"} <= {*told}
    assert not any(each.startswith(("0 ", "1 rows")) for each in told)


def seen_passes(monkeypatch) -> list[PassSize]:
    """The sizes of the passes that are timed."""
    found, inner = [], profile_passes.on_host

    def on_host(work):
        scheduler = seen_passes.engine._slots.scheduler
        found.append(PassSize.of(scheduler.next()))
        return inner(work)

    class Seen(Engine):
        def __init__(self, *given):
            super().__init__(*given)
            seen_passes.engine = self

    monkeypatch.setattr(profile_passes, "on_host", on_host)
    monkeypatch.setattr(profile_passes, "Engine", Seen)
    return found


def test_the_passes_of_a_decoder_that_are_timed_are_those_of_the_table(monkeypatch):
    passes = seen_passes(monkeypatch)
    table = profile(decoder("llama"), RECIPE, axes=AXES, repeats=1)
    assert isinstance(table, DecoderCost) and (table.extras, table.rows, table.kv) == AXES
    sizes = {(size.rows, size.decoded, size.prompt_tokens) for size in passes}
    assert {(1, 1, 0), (2, 2, 0), (4, 4, 0)} <= sizes, "decode steps"
    assert {(1, 0, 2), (2, 1, 2), (4, 3, 2)} <= sizes, "one token beyond one each"
    assert {(2, 0, 14), (4, 2, 14)} <= sizes, "twelve, by two rows: a row reads eight at most"
    assert len(sizes) == 8 and all(size.rows <= 4 and size.prompt_tokens + size.decoded <= 16 for size in passes)
    assert table.times[2][0] == table.times[2][1], "what one row cannot read in a pass is read by two"
    traffic = make_traffic(30, Gamma(100), Uniform(1, 8), Uniform(1, 8))
    served = simulate_traffic(traffic, ContinuousBatching(max_rows=4, budget=12, chunk=8), table)
    assert served.passes.rows.max() <= 4 and served.tokens_per_s > 0


def test_rows_see_as_many_columns_on_average_as_the_table_says(monkeypatch):
    passes = seen_passes(monkeypatch)
    profile(decoder("llama"), RECIPE, axes=((0,), (2,), (26,)), repeats=1)
    columns = [size.columns / size.decoded for size in passes]
    assert len(columns) == 2 and all(later > earlier for earlier, later in pairwise(columns))
    assert columns[0] < 26 < columns[1] + profile_passes.DECODE_STEPS


def test_a_table_is_measured_once_for_a_machine_and_a_commit(cache, monkeypatch):
    model, axes = encoder("bert"), ((4, 8), (1, 2))
    first = profile(model, axes=axes, repeats=1)
    [path] = cache.iterdir()
    assert profile(model, axes=axes, repeats=1) == first
    assert profile(model, "baseline", axes=axes, repeats=1) != first and len([*cache.iterdir()]) == 2
    assert profile(model, axes=axes, repeats=1, fresh=True) != first
    other = replace(encoder("distilbert"), name=model.name)
    assert profile(other, axes=axes, repeats=1) != first and len([*cache.iterdir()]) == 3
    path.write_text("damaged")
    assert profile(model, axes=axes, repeats=1).lengths == (4, 8), "measured again, and written anew"
    assert path.read_text() != "damaged"
    monkeypatch.setattr(
        "eet_lab.serving.profile.versions", lambda device: measured.versions(device) | {"commit": "c0+"}
    )
    before = len([*cache.iterdir()])
    assert profile(model, axes=axes, repeats=1) != profile(model, axes=axes, repeats=1), "code that changed since"
    assert len([*cache.iterdir()]) == before


def test_an_installed_package_keeps_tables_until_another_one_is_installed(cache, tmp_path, monkeypatch):
    about = tmp_path / "eet_lab-1.dist-info"
    about.mkdir()
    monkeypatch.setattr("eet_lab.serving.profile.versions", lambda device: measured.versions(device) | {"commit": None})
    monkeypatch.setattr("eet_lab.serving.profile.is_clone", lambda: False)
    monkeypatch.setattr("eet_lab.serving.profile.metadata.distribution", lambda name: metadata.Distribution.at(about))
    model, axes = encoder("bert"), ((4, 8), (1, 2))

    def measure():
        return profile(model, axes=axes, repeats=1)

    (about / "RECORD").write_text("eet_lab/__init__.py,sha256=a,1\n")
    assert measure() != measure(), "another package runs than the one that is installed"
    monkeypatch.setattr("eet_lab.serving.profile.PACKAGE", tmp_path / "eet_lab")
    first = measure()
    assert measure() == first
    (about / "RECORD").write_text("eet_lab/__init__.py,sha256=b,1\n")
    assert measure() != first


def test_the_default_axes_fit_the_model():
    table = profile(decoder("llama"), RECIPE, repeats=1)
    assert table.extras[:2] == (0, 1) and table.extras[-1] == 15 and table.rows == (1, 4)
    assert 20 < table.kv[-1] < 64


def test_a_processor_that_was_shared_is_noted(monkeypatch):
    from eet_lab.bench import timing

    monkeypatch.setattr(timing, "UNDISTURBED", 1e9)
    table = profile(encoder("bert"), axes=((4,), (1,)), repeats=1, note="for a test")
    assert table.source.note == f"for a test; {timing.SHARED}"


@pytest.mark.parametrize(
    ("model", "recipe", "axes", "error", "says"),
    [
        (encoder, None, ((4, 41), (1,)), CostError, "the longest text is 41"),
        (encoder, None, ((8, 4), (1,)), CostError, "Sort its numbers"),
        (encoder, None, ((4,), (1,), (1,)), CostError, "There are 3 axes"),
        (decoder, "all", None, RecipeError, "add continuous_batching"),
        (decoder, RECIPE, ((0,), (1, 5), (4,)), CostError, "rows go from 1 to 5"),
        (decoder, RECIPE, ((0,), (1,), (100_000,)), CostError, "the model's context is"),
        (decoder, RECIPE, ((0,), (1,)), CostError, "There are 2 axes"),
    ],
)
def test_what_cannot_be_measured_is_told_before_any_work(model, recipe, axes, error, says):
    with pytest.raises(error, match=says):
        profile(model("bert" if model is encoder else "llama"), recipe, axes=axes, repeats=1)
    with pytest.raises(PromptError, match="repeats is 0"):
        profile(encoder("bert"), repeats=0)


@pytest.mark.parametrize("model", [lambda: encoder("bert"), lambda: decoder("llama")], ids=["encoder", "decoder"])
def test_stop_ends_it(model):
    stop = threading.Event()
    with pytest.raises(Cancelled):
        profile(model(), progress=lambda done, total, what: done and stop.set(), cancel=stop, repeats=1)
