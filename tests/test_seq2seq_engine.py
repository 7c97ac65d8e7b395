"""Encoder-decoders that generate: the tokens of transformers, whatever the recipe, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from threading import Event
from types import SimpleNamespace

import pytest
import torch
import transformers
from seq2seqs import CONFIGS, CONTEXT, NEW, SOURCES, V, expected, ours, rows, theirs

import eet_lab
from eet_lab.engine import seq2seq
from eet_lab.engine.engine import Engine
from eet_lab.engine.seq2seq import Seq2SeqEngine
from eet_lab.engine.settings import Settings
from eet_lab.errors import EETError, ModelError, PromptError, RecipeError
from eet_lab.models import load
from eet_lab.technique import Recipe, obstacle, registry
from eet_lab.texts import as_recipe

RECIPES = (
    "",
    "pre_padding,memory_reuse:kv=paged",
    "mask_removal",
    "pre_padding,mask_removal,packed_prefill,memory_reuse",
)
ALL = ("pre_padding", "mask_removal", "memory_reuse", "packed_prefill")


def engine(name: str, recipe: str = RECIPES[3]) -> Seq2SeqEngine:
    return Seq2SeqEngine(ours(name).network, Recipe.parse(recipe).parts)


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_transformers(name):
    """Greedy, of ragged sources; and in a second batch of the same engine, which is smaller. What is drawn varies more:
    see below.
    """
    assert len({row for row in expected(name)}) > 1, "sources do not matter: that proves little"
    for words in RECIPES:
        made = engine(name, words)
        assert list(made.generate(rows(), Settings(NEW)).tokens) == expected(name), words
        again = made.generate(rows()[3:5], Settings(NEW - 1))
        last = ours(name).config.forced_eos_id
        for row, wanted in zip(again.tokens, expected(name)[3:5], strict=True):
            assert row == (wanted[: NEW - 1] if last is None else (*wanted[: NEW - 2], last)), words


@pytest.mark.parametrize("name", CONFIGS)
def test_draws_are_the_same_in_every_recipe_and_as_likely_as_transformers_says(name):
    settings = Settings(NEW, temperature=1.5, top_k=40, top_p=0.95, seed=4, logprobs=2)
    runs = [engine(name, words).generate(rows(), settings) for words in RECIPES[::3]]
    assert runs[0].tokens == runs[1].tokens != tuple(expected(name))
    assert len({token for row in runs[0].tokens for token in row}) > 8, "it says always the same: that proves little"
    assert not {*ours(name).config.suppressed} & {token for row in runs[0].tokens for token in row}
    for row, source, told in zip(runs[0].tokens, rows(), runs[0].logprobs, strict=True):
        read = torch.tensor([[ours(name).config.start_id, *row[:-1]]])
        with torch.no_grad():
            exact = theirs(name)(torch.tensor([source]), decoder_input_ids=read).logits[0].log_softmax(-1)
        is_forced = ours(name).config.forced_eos_id is not None
        for place, token in enumerate(row):
            wanted = 0.0 if is_forced and place == NEW - 1 else float(exact[place, token])
            assert told[place].logprob == pytest.approx(wanted, abs=2e-3) and len(told[place].top) == 2


def test_rows_end_at_their_stop_token_and_their_own_number_of_tokens():
    name = "marian-odd"
    wanted = expected(name)
    stop = wanted[1][4]
    told = engine(name).generate(rows(), Settings(NEW, stop=(stop,)))
    for row, whole in zip(told.tokens, wanted, strict=True):
        assert row == (whole[: whole.index(stop) + 1] if stop in whole else whole)
    each = [Settings(1 + number) for number in range(len(SOURCES))]
    for number, row in enumerate(engine(name).generate(rows(), each).tokens):
        assert row == wanted[number][: 1 + number]
    forced = [list(reversed(row)) for row in wanted]
    assert list(engine(name).generate(rows(), Settings(NEW), forced=forced).tokens) == [tuple(row) for row in forced]


def test_a_run_can_be_stopped_and_counts_what_it_holds():
    stop, made = Event(), engine("t5", "memory_reuse")
    told = made.generate(rows(), Settings(NEW), on_step=lambda event: stop.set(), cancel=stop)
    assert set(told.finish) == {"cancelled"} and all(len(row) <= 2 for row in told.tokens)
    config, per_token = ours("t5").config, ours("t5").config.kv_bytes_per_token(4)
    assert made.kv_bytes == per_token * len(SOURCES) * (1 + NEW + max(SOURCES)) and config.num_layers == 2
    assert set(made.plans()) == {"encode", "prefill", "decode"}
    made.close()
    assert made.kv_bytes == 0
    assert list(made.generate(rows(), Settings(NEW)).tokens) == expected("t5")


def test_a_run_can_be_stopped_while_sources_are_read():
    """Between two ops of the encoder: nothing is generated, and the next batch is answered."""
    made, looks = engine("t5", RECIPES[1]), count()
    told = made.generate(rows(), Settings(NEW), cancel=SimpleNamespace(is_set=lambda: next(looks) >= 8))
    assert told.cancelled and told.num_tokens == 0 and made._source is None
    assert list(made.generate(rows(), Settings(NEW)).tokens) == expected("t5")


def test_the_last_batchs_keys_and_values_are_gone_before_the_next_ones_are_made(monkeypatch):
    made, there = engine("t5"), []
    store = seq2seq._store

    def watched(model, batch):
        if not batch.ids.is_meta:
            there.append(made._source)
        return store(model, batch)

    monkeypatch.setattr(seq2seq, "_store", watched)
    for _ in range(2):
        made.generate(rows(), Settings(2))
    assert there == [None, None]


def test_texts_are_answered():
    model = replace(ours("t5"), tokenizer=None)
    told = eet_lab.generate(model, rows()[:2], "all", max_new_tokens=NEW, stop_at_eos=False)
    assert list(told.run.tokens) == expected("t5")[:2] and told.recipe.names == ALL


@pytest.mark.parametrize("where", ["config", "generation_config"])
def test_an_answer_ends_at_every_token_at_which_transformers_ends_it(where, tmp_path):
    theirs("t5").save_pretrained(tmp_path)
    ends = sorted({row[4] for row in expected("t5")})[:2]
    if where == "config":
        (tmp_path / "generation_config.json").unlink()
    path = tmp_path / f"{where}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    peer = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    model, lengths = load(tmp_path, device="cpu"), set()
    for source in rows():
        told = peer.generate(torch.tensor([source]), max_new_tokens=NEW, do_sample=False, num_beams=1)[0, 1:].tolist()
        for each in (model, load(peer, device="cpu")):
            assert eet_lab.generate(each, [source], "baseline", max_new_tokens=NEW).run.tokens == (tuple(told),)
        lengths.add(len(told))
    assert len(lengths) > 1


@pytest.mark.parametrize("technique", registry())
def test_every_technique_serves_encoder_decoders_or_says_why_not(technique):
    config = ours("bart").config
    reason = obstacle(registry()[technique](), "cpu", config)
    assert (technique in ALL) == (reason is None)
    if reason is not None:
        assert len(reason.split()) > 4
        with pytest.raises(RecipeError, match=f"{technique} cannot run on "):
            as_recipe(technique, "cpu", config)


@pytest.mark.parametrize(
    ("prompts", "settings", "says"),
    [
        ([], {}, "There are no texts to answer; give at least one."),
        ([[7], []], {}, "Text 2 has no tokens"),
        ([[V]], {}, f"the token {V}"),
        ([[7] * (CONTEXT + 1)], {}, f"Text 1 has 65 tokens, but this encoder reads at most {CONTEXT}"),
        ([[7]], {"max_new_tokens": CONTEXT}, "max_new_tokens is 64, but the decoder has room for 63"),
    ],
)
def test_sources_that_cannot_be_read(prompts, settings, says):
    with pytest.raises(PromptError, match=says):
        engine("bart").generate(prompts, Settings(**settings))


def test_settings_of_other_texts_are_told():
    with pytest.raises(PromptError, match="settings has 1 Settings for 2 texts; give each text its own, or one"):
        engine("bart").generate([[7], [8]], [Settings()])


def test_what_is_for_decoders_says_so():
    model = ours("bart")
    with pytest.raises(ModelError, match="takes a Decoder, not a Seq2Seq: give it .*Seq2SeqEngine"):
        Engine(model.network)
    with pytest.raises(ModelError, match="takes a Seq2Seq, not .*: give it .*model.network|Seq2Seq"):
        Seq2SeqEngine(model)
    for words, told in (
        ("pre_padding,mask_removal,packed_prefill,memory_reuse:kv=paged,continuous_batching", "schedule"),
        ("int8_weights", "weights"),
    ):
        with pytest.raises(RecipeError, match=f"These parts change {told}, which is for decoders"):
            Seq2SeqEngine(model.network, Recipe.parse(words).parts)
    for call in (
        lambda: engine("bart").add([7]),
        lambda: engine("bart").reserve(1, 2),
        lambda: engine("bart").forecast([[7]]),
        lambda: engine("bart").lifetimes([[7]]),
        lambda: eet_lab.compare(model, [[7]], recipe="all"),
        lambda: eet_lab.serve(model),
        lambda: eet_lab.pipeline("text-generation", model),
        lambda: eet_lab.encode(model, [[7]]),
    ):
        with pytest.raises(EETError, match="encoder-decoder"):
            call()
