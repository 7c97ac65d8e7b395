"""One technique whose code is broken: it is named where it is selected, and nothing else is disturbed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from eet_lab.bench import compare
from eet_lab.commands.techniques import table
from eet_lab.errors import RecipeError
from eet_lab.labels import short_form
from eet_lab.parts import Parts
from eet_lab.scheduling import LEFT_PADDED
from eet_lab.technique import _REGISTRY, Recipe, Technique, everything, obstacle, register, registry
from eet_lab.texts import as_recipe, generate
from eet_lab.workbench.choices import State

BEFORE = everything("cpu")


def no_return(parts: Parts) -> Any:
    replace(parts, schedule=LEFT_PADDED)


def raises(parts: Parts) -> Any:
    raise ZeroDivisionError("by what?")


def no_parts(parts: Parts) -> Any:
    return replace(parts, ops=None)


def weights_of_one(parts: Parts) -> Any:
    return replace(parts, weights=None)


def no_attention(parts: Parts) -> Any:
    return replace(parts, ops=replace(parts.ops, attention="fast"))


def launch_of_two(parts: Parts) -> Any:
    return replace(parts, launch=lambda decode, longest: decode)


BROKEN = {
    launch_of_two: r"broken: its apply returned Parts whose launch cannot be called as launch\(decode, longest, pool\)",
    no_attention: r"broken: its apply returned Parts whose ops.attention is 'fast', but it must be a function",
    no_return: r"broken: its apply returned None, but it must return the changed Parts",
    raises: r"broken: its apply raised ZeroDivisionError: by what\?",
    no_parts: r"broken: its apply returned Parts whose ops is None, but it must be Ops",
    weights_of_one: r"broken: its apply returned Parts whose weights is None, but it must be a tuple",
}


@pytest.fixture(params=BROKEN, ids=lambda function: function.__name__)
def broken(request, forgotten):
    """A learner's technique, as a cell would register it, and what is said of it."""

    @register
    @dataclass(frozen=True)
    class Broken(Technique):
        """Its code does not do what it should."""

        name: ClassVar[str] = "broken"
        title: ClassVar[str] = "Broken one"

        def apply(self, parts: Parts) -> Parts:
            return request.param(parts)

    return BROKEN[request.param]


def test_it_is_named_where_it_is_selected(broken):
    for recipe in ("broken", "pre_padding,broken", "all,broken"):
        with pytest.raises(RecipeError, match=broken + r".*Mend it, or leave broken out"):
            Recipe.parse(recipe)
    with pytest.raises(RecipeError, match=broken) as caught:
        as_recipe("broken", "cpu")
    assert ("raised" in broken) is (caught.value.__cause__ is not None), "where it broke can be seen"


def test_all_leaves_it_out_and_every_list_says_why(broken):
    assert everything("cpu") == BEFORE == as_recipe("all", "cpu")
    assert short_form(str(BEFORE), "cpu") == "all"
    assert (line := table([t() for t in registry().values()], "cpu").splitlines()[-1]).startswith("broken ")
    assert "no: it is broken: its apply" in line


def test_what_is_not_selected_disturbs_nothing(broken, tiny):
    assert generate(tiny, [[1, 2]], "all", max_new_tokens=2, stop_at_eos=False).recipe == BEFORE
    assert compare(tiny, [[1, 2]], "pre_padding", repeats=1, max_new_tokens=2).parity.verdict == "identical"


def test_the_workbench_greys_it_with_the_reason(broken):
    state = State(device="cpu")
    state.choose(BEFORE)
    state.settle()
    assert state.recipe() == BEFORE
    assert state.blocked("broken").startswith("it is broken: its apply")
    assert state.blocked("pre_padding") is None
    state.toggle("broken", True)
    assert not state.is_on("broken") and state.recipe() == BEFORE


def test_one_that_needs_it_cannot_run_either(broken):
    @dataclass(frozen=True)
    class Above(Technique):
        name: ClassVar[str] = "above"
        title: ClassVar[str] = "Above"
        requires: ClassVar[tuple[str, ...]] = ("broken",)

        def apply(self, parts: Parts) -> Parts:
            return parts

    register(Above)
    assert obstacle(Above(), "cpu").startswith("it needs broken, which is broken: its apply")


def test_one_that_refuses_other_parts_is_not_called_broken(forgotten):
    @register
    @dataclass(frozen=True)
    class Choosy(Technique):
        name: ClassVar[str] = "choosy"
        title: ClassVar[str] = "Choosy"

        def apply(self, parts: Parts) -> Parts:
            raise RecipeError("choosy goes with nothing. Leave it out.")

    for recipe in ("choosy", "pre_padding,choosy"):
        with pytest.raises(RecipeError, match="^choosy goes with nothing. Leave it out.$"):
            Recipe.parse(recipe)
    assert everything("cpu") == BEFORE and obstacle(Choosy(), "cpu") == "choosy goes with nothing. Leave it out."


def test_one_that_cannot_tell_whether_it_can_run(forgotten):
    @register
    @dataclass(frozen=True)
    class Unsure(Technique):
        name: ClassVar[str] = "unsure"
        title: ClassVar[str] = "Unsure"

        def apply(self, parts: Parts) -> Parts:
            return replace(parts, schedule=LEFT_PADDED)

        def unavailable(self, device: str = "cpu") -> str | None:
            raise LookupError(device)

    assert everything("cpu") == BEFORE
    with pytest.raises(RecipeError, match="unsure cannot run on cpu: it is broken: its unavailable raised LookupError"):
        as_recipe("unsure", "cpu")


def defined(**attributes: Any) -> type[Technique]:
    """A technique's class with these class attributes."""
    own = {"name": "mine", "title": "Mine", "apply": lambda self, parts: parts} | attributes
    return dataclass(frozen=True)(type("Mine", (Technique,), own))


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"name": "all"}, "Mine.name is 'all', which stands for other things in a recipe; choose another"),
        ({"name": "baseline"}, "'baseline', which stands for other things"),
        ({"requires": ("mine",)}, "Mine requires itself; leave 'mine' out of its requires"),
        ({"requires": ("pre_paddin",)}, "requires 'pre_paddin', which is not registered. Did you mean 'pre_padding'"),
        (
            {"requires": "pre_padding"},
            r"requires is 'pre_padding', but it must be a tuple of names.*\('pre_padding',\)",
        ),
        ({"requires": (3,)}, r"requires is \(3,\), but it must be a tuple of names"),
        ({"tolerance": "x"}, "tolerance is 'x', but it must be a number from 0 on"),
        ({"tolerance": float("nan")}, "tolerance is nan, but it must be a number from 0 on"),
        ({"tolerance": -0.5}, "tolerance is -0.5, but it must be a number from 0 on"),
        ({"tolerance": True}, "tolerance is True, but it must be a number from 0 on"),
        ({"__annotations__": {"factor": int}}, r"Mine\(\) fails with TypeError.*'factor'.*Give every field a default"),
    ],
)
def test_what_cannot_be_a_technique_is_refused_when_it_is_registered(attributes, says, forgotten):
    before = dict(_REGISTRY)
    with pytest.raises(RecipeError, match=says):
        register(defined(**attributes))
    assert before == _REGISTRY


def test_a_circle_is_refused_when_it_closes(forgotten):
    def technique(name, *requires):
        return defined(name=name, requires=requires)

    register(technique("first"))
    register(technique("second", "first"))
    register(technique("third", "second"))
    with pytest.raises(RecipeError, match="Mine requires itself, by way of third and second; leave one of them out"):
        register(technique("first", "third"))
    register(technique("third", "first", "second"))  # two ways to the same end are no circle
    assert Recipe.parse("all,first,second,third").names[-3:] == ("first", "second", "third")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("all:x", "'all:x': all has no knobs. A knob follows its technique, as in all,memory_reuse:kv=paged"),
        ("baseline:x=1", "'baseline:x=1': baseline has no knobs"),
        ("-all", "'-all' would leave nothing: write baseline for no technique"),
        ("all,-all", "'-all' would leave nothing"),
        ("all,-baseline", "'-baseline' leaves nothing out: baseline is the recipe without any technique"),
    ],
)
def test_words_that_name_no_technique_are_explained(words, says):
    with pytest.raises(RecipeError, match=says):
        Recipe.parse(words)
