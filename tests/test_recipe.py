"""Techniques and recipes: the contract that every technique keeps, and the errors of the recipe language."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import pytest
from every_recipe import every_recipe, every_set, is_whole, needs

from eet_lab.errors import RecipeError
from eet_lab.labels import short_form
from eet_lab.models.config import PRESETS
from eet_lab.parts import Parts, replaced
from eet_lab.scheduling import UP_TO_THE_SHORTEST
from eet_lab.technique import (
    _REGISTRY,
    NUMERICS,
    Recipe,
    Technique,
    everything,
    is_in_all,
    knob,
    listed,
    names_in_all,
    register,
    registry,
)
from eet_lab.texts import as_recipe

ALL = list(registry().values())
IDS = [t.name for t in ALL]


@pytest.mark.parametrize("technique", ALL, ids=IDS)
class TestContract:
    def test_pure_and_effective(self, technique):
        before = Recipe(tuple(registry()[name]() for name in technique.requires)).parts
        kept = replace(before)
        assert technique().apply(before) == technique().apply(before) != before
        assert before == kept

    def test_card(self, technique):
        card, summary = technique().card, technique().summary
        assert len(card.splitlines()) >= 6 and summary.endswith(".") and len(summary) <= 120, "a line of a table"
        assert card.replace("\n", " ").startswith(f"{summary}  "), "its first paragraph"
        assert technique.title and technique.numerics in NUMERICS and set(technique.requires) <= set(IDS)

    def test_round_trip(self, technique):
        needed = [registry()[name]() for name in technique.requires]
        for value in _knob_settings(technique):
            recipe = Recipe((technique(**value), *needed))
            assert Recipe.parse(str(recipe)) == recipe

    def test_leave_one_out_drops_dependents(self, technique):
        recipe = Recipe(tuple(t() for t in ALL))
        rest, also = recipe.without(technique.name)
        assert technique.name not in rest.names
        assert set(also) == {t.name for t in ALL if technique.name in t.requires}


def _knob_settings(technique):
    yield {}
    for name, limits in (knobs := technique().knobs).items():
        bound = [other for other in knobs if limits["at_least"] == other or knobs[other]["at_least"] == name]
        for value in limits["choices"] or (limits["low"], limits["high"]):
            yield {name: value} | {other: min(value, knobs[other]["high"]) for other in bound}


def test_of_ours_none_conflict_and_whoever_lacks_another_is_told_its_name():
    """Of all that generates or encodes, and of all that trains; a technique of one goes with any of the other."""
    training = [name for name in IDS if name not in listed()]
    mixed = [tuple(name for name in IDS if name in pair) for pair in product(listed(), training)]
    for names in (*every_set(listed()), *every_set(training), *mixed):
        if is_whole(names):
            assert Recipe.parse(",".join(names)).names == names
            continue
        with pytest.raises(RecipeError, match=" needs ") as caught:
            Recipe.parse(",".join(names))
        who, _, lacking = str(caught.value).partition(";")[0].partition(" needs ")
        assert set(lacking.split(" and ")) == set(registry()[who].requires) - set(names) and who in names


def num_whole(names):
    """How many whole sets there are: those without one technique and all that need it, and those with all it needs."""
    if not names:
        return 1
    one = min(names)
    return num_whole({name for name in names if one not in needs(name)}) + num_whole(names - needs(one))


def test_as_many_recipes_are_tested_on_a_gpu_as_should_be():
    recipes = every_recipe(names_in_all())
    assert len(recipes) == len(set(recipes)) == num_whole(set(names_in_all()))


def test_headline_techniques_come_first():
    assert IDS[:3] == ["pre_padding", "mask_removal", "memory_reuse"]


def test_order_of_words_does_not_matter():
    assert Recipe.parse("memory_reuse, pre_padding") == Recipe.parse("pre_padding,memory_reuse")


def test_the_baseline_is_the_default_parts():
    assert Recipe().parts == Recipe.parse("baseline").parts == Recipe.parse("").parts == Parts()
    assert str(Recipe()) == "baseline"


def test_all_means_what_can_run_here():
    assert everything("cpu").names == ("pre_padding", "mask_removal", "memory_reuse", "packed_prefill")
    assert Recipe.parse("all,memory_reuse:kv=paged", "cpu").names == everything("cpu").names
    gone = ("mask_removal", "packed_prefill")  # the second needs the first
    assert Recipe.parse("all,-mask_removal").names == tuple(n for n in everything("cpu").names if n not in gone)


def test_all_on_a_gpu_is_all_that_loses_nothing(monkeypatch):
    for technique in ALL:
        monkeypatch.setattr(technique, "unavailable", lambda self, device: None)
    assert everything("cuda").names == tuple(
        name for name in listed() if name not in ("continuous_batching", "prefix_caching", "int8_weights")
    )
    assert Recipe.parse("all,continuous_batching,prefix_caching,int8_weights", "cuda").names == listed()
    fused = {"fused_norms", "fused_activations", "fused_residuals", "fused_embeddings", "fused_cross_entropy"}
    others = {
        "chunked_cross_entropy",
        "flat_optimizer",
        "varlen_attention",
        "short_attention",
        "batched_cross_attention",
    }
    assert {*IDS} - {*listed()} == fused | others | {"captured_steps"}


@pytest.mark.parametrize(
    "words, says",
    [
        ("pre_paddin", "Did you mean 'pre_padding'"),
        ("fused", "Did you mean 'fused_"),
        ("train", r"no technique 'train'\. `eet-lab"),
        ("-nonsense", "no technique 'nonsense'"),
        ("-pre_padding", "'-pre_padding' leaves out what is not there"),
        ("pre_padding,-mask_removal", "Name it after all, as in all,-mask_removal"),
        (5, "A recipe is 5, but it must be words"),
        ("memory_reuse:planer=first_fit", "no knob 'planer'.*Did you mean 'planner'"),
        ("memory_reuse:planner=best", "'best'.*one of greedy_by_size"),
        ("cuda_graphs:bucket=3,memory_reuse", "3.*from 16 to 4096"),
        ("cuda_graphs:bucket=many,memory_reuse", "'many'.*a whole number"),
        ("cuda_graphs:bucket=9999,memory_reuse", "9999.*a whole number from 16 to 4096"),
        ("int8_weights:group=100,fused_kernels", r"group is 100, but it must be one of [\d, ]+\.$"),
        ("int8_weights:head=2,fused_kernels", r"'2', but it must be True or False\.$"),
        ("int8_weights:group=many,fused_kernels", r"'many', but it must be one of [\d, ]+\.$"),
        ("packed_prefill", "needs pre_padding and mask_removal; turn those on as well"),
        ("packed_prefill,pre_padding", "needs mask_removal; turn that on as well"),
        ("mask_removal:x=1", "no knobs"),
        ("pre_padding:read=shortest,pre_padding", "pre_padding is named twice"),
        ("memory_reuse:kv=paged:kv=static", "memory_reuse:kv is given twice"),
        ("cuda_graphs", "needs memory_reuse"),
    ],
)
def test_mistakes_are_explained(words, says):
    with pytest.raises(RecipeError, match=says):
        Recipe.parse(words)


@pytest.mark.parametrize(
    "where, says",
    [
        (["cuda0"], "device is 'cuda0', but it must be 'cuda', 'cuda:1' .* or 'cpu', such as model.device"),
        ([5], "device is 5, but"),
        (["cpu", "demo"], "config is 'demo', but it must be a model's: model.config, or None"),
    ],
)
def test_where_a_recipe_is_for_is_checked(where, says):
    with pytest.raises(RecipeError, match=says):
        Recipe.parse("all", *where)


def test_techniques_in_a_list_stand_in_place_of_those_of_all():
    own = registry()["memory_reuse"](kv="paged")
    assert as_recipe(["all", own], "cpu") == as_recipe(["all", "memory_reuse:kv=paged"], "cpu")
    with pytest.raises(RecipeError, match="memory_reuse is named twice"):
        as_recipe(["all", "memory_reuse", own], "cpu")
    with pytest.raises(RecipeError, match="A Recipe is made of techniques, not of 'all'; Recipe.parse reads words"):
        Recipe(("all",))


def test_a_minus_takes_along_what_needs_it_unless_that_was_named():
    assert Recipe.parse("all,-pre_padding", "cpu").names == ("mask_removal", "memory_reuse")
    with pytest.raises(RecipeError, match="packed_prefill needs pre_padding"):
        Recipe.parse("packed_prefill,all,-pre_padding", "cpu")


def test_unavailable_techniques_are_refused_not_ignored():
    with pytest.raises(RecipeError, match="cuda_graphs cannot run on cpu.*NVIDIA GPU"):
        Recipe.parse("memory_reuse,cuda_graphs").check("cpu")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("dependent_launch", "dependent_launch cannot run on cpu: .*NVIDIA GPU.*9.0 .Hopper.*Leave dependent_launch"),
        ("cuda_graphs", "cuda_graphs cannot run on cpu: .*NVIDIA GPU.*Leave cuda_graphs out"),
        (
            "all,fused_sampling,cuda_graphs",
            "fused_sampling cannot run on cpu.* Leave fused_sampling and cuda_graphs out",
        ),
        ("packed_prefill", "needs pre_padding and mask_removal; turn those on as well"),
    ],
)
def test_what_the_device_cannot_do_is_said_before_what_is_missing(words, says):
    with pytest.raises(RecipeError, match=says):
        as_recipe(words, "cpu")


def test_a_technique_cannot_run_where_what_it_requires_cannot(own):
    own.requires = ("fused_kernels",)
    with pytest.raises(RecipeError, match="rival cannot run on cpu: it needs fused_kernels, and CUDA kernels need an"):
        as_recipe([own()], "cpu")


@pytest.fixture
def own(forgotten):
    """A learner's own technique, as it would be written in a cell."""

    @register
    @dataclass(frozen=True)
    class Rival(Technique):
        """Read up to the shortest prompt."""

        name: ClassVar[str] = "rival"
        title: ClassVar[str] = "Rival"
        factor: int = knob(2, "Nothing.", low=1, high=4)

        def apply(self, parts: Parts) -> Parts:
            return replace(parts, schedule=UP_TO_THE_SHORTEST)

    return Rival


def test_a_technique_from_a_cell_is_a_citizen(own):
    assert Recipe.parse("rival:factor=3").techniques == (own(factor=3),)
    assert "rival" in registry() and str(own(factor=3)) == "rival:factor=3"


def test_conflicts_are_computed_per_slot(own):
    with pytest.raises(RecipeError, match="pre_padding and rival both replace schedule"):
        Recipe.parse("pre_padding,rival")
    assert "rival" not in everything("cpu").names  # what came first stays
    assert list(replaced(Parts(), own().apply(Parts()))) == ["schedule"]


def test_one_that_wraps_takes_no_slot(own):
    own.wraps = True
    assert Recipe.parse("pre_padding,rival").parts.schedule is UP_TO_THE_SHORTEST


def test_what_a_technique_requires_it_may_refine(own):
    own.requires = ("pre_padding",)
    assert Recipe.parse("pre_padding,rival").parts.schedule is UP_TO_THE_SHORTEST


def test_a_knob_keeps_its_type():
    with pytest.raises(RecipeError, match=r"100.5.*a whole number from 16 to 4096"):
        registry()["cuda_graphs"](bucket=100.5)
    for name, turned, value, says in (
        ("fused_kernels", "norm_rows", 2.0, "norm_rows is 2.0, but it must be one of 1, 2"),
        ("int8_weights", "head", 1, "head is 1, but it must be True or False"),
        ("continuous_batching", "joins", 0, "joins is 0, but it must be True or False"),
    ):
        with pytest.raises(RecipeError, match=says):
            registry()[name](**{turned: value})


def _without_apply():
    @dataclass(frozen=True)
    class Idle(Technique):
        name: ClassVar[str] = "idle"
        title: ClassVar[str] = "Idle"

    return Idle


def _not_frozen():
    class Loose(Technique):
        name, title = "loose", "Loose"

        def apply(self, parts: Parts) -> Parts:
            return parts

    return Loose


def _named(word):
    @dataclass(frozen=True)
    class Named(Technique):
        name: ClassVar[str] = word
        title: ClassVar[str] = "Named"

        def apply(self, parts: Parts) -> Parts:
            return parts

    return Named


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (_without_apply, "Idle has no apply"),
        (_not_frozen, "Loose is not a frozen dataclass"),
        (lambda: _named("pre_padding"), "'pre_padding' is taken"),
        (lambda: _named("my-mask"), "'my-mask'.*letters, digits"),
        (lambda: _named(None), "has no name"),
        (lambda: print, "is not a technique"),
    ],
)
def test_what_is_no_technique_is_refused_when_it_is_registered(made, says):
    before = dict(_REGISTRY)
    with pytest.raises(RecipeError, match=says):
        register(made())
    assert before == _REGISTRY


def test_the_text_of_a_choice_is_told_apart_from_the_choice():
    with pytest.raises(RecipeError, match=r"one of 0, 64, 128\. Give 64, a whole number, rather than the text '64'\.$"):
        registry()["int8_weights"](group="64")


def test_a_knob_behind_a_comma_is_told_where_it_belongs():
    for words, joined in (
        ("continuous_batching:rows=3,chunk=5", "continuous_batching:rows=3:chunk=5"),
        ("all, continuous_batching , chunk=5:budget=7", "continuous_batching:chunk=5:budget=7"),
    ):
        with pytest.raises(RecipeError, match=rf"'chunk=5.*'\. It is a knob of continuous_batching: write {joined}\.$"):
            Recipe.parse(words)
    for other in ("page=32", "rows=4"):  # of none there, and one that is given already
        with pytest.raises(RecipeError, match=rf"'{other}'\. A knob follows its technique after a colon"):
            Recipe.parse(f"continuous_batching:rows=3,{other}")


CPU = "pre_padding,mask_removal,memory_reuse,packed_prefill"
PAGED = CPU.replace("reuse", "reuse:kv=paged:page=32")


@pytest.mark.parametrize(
    "recipe, device, label",
    [
        ("baseline", "cpu", "baseline"),
        ("", "cuda", "baseline"),
        (CPU, "cpu", "all"),
        (CPU, "cuda", "pre-padding + mask removal + memory reuse + packed prefill"),
        (PAGED, "cpu", "all + memory reuse (KV layout: pages, page size: 32)"),
        ("pre_padding,memory_reuse", "cpu", "pre-padding + memory reuse"),
        (CPU.replace(",mask_removal", ""), "cpu", "all - mask removal"),
        ("pre_padding", "cpu", "pre-padding"),
        ("pre_padding,int8_weights", "cpu", "pre-padding + int8 weights"),
        ("of_another_day,memory_reuse", "cpu", "of_another_day + memory reuse"),
        (f"{CPU},continuous_batching:joins=False", "cpu", "all + continuous batching (join while others run: off)"),
        ("int8_weights:head=False", "cpu", "int8 weights (LM head: off)"),
    ],
)
def test_a_recipe_has_a_short_label(recipe: str, device: str, label: str) -> None:
    assert short_form(recipe, device) == label


def test_without_one_technique_the_label_says_so() -> None:
    whole = [name for name in names_in_all() if registry()[name].__module__.startswith("eet_lab.")]
    assert short_form(",".join(whole), "cuda") == "all"
    rest = ",".join(name for name in whole if name != "cuda_graphs")
    assert short_form(rest, "cuda") == "all - CUDA graphs"


def test_the_label_of_training_knows_what_all_means_there() -> None:
    trained = PRESETS["gpt2"].in_training
    kinds = [kind for kind in registry().values() if kind.__module__.startswith("eet_lab.")]
    whole = [kind.name for kind in kinds if is_in_all(kind, training=True) and kind().unfit(trained) is None]
    assert "captured_steps" in whole and "cuda_graphs" not in whole
    assert short_form(",".join(whole), "cuda", trained) == "all"
    rest = ",".join(name for name in whole if name != "captured_steps")
    assert short_form(rest, "cuda", trained) == "all - captured steps"
