"""What is left between a measured step and its floor, and which techniques attack it."""

from __future__ import annotations

from collections.abc import Mapping

from eet_lab.bench.calls import counted, num_kernels
from eet_lab.bench.rows import Row
from eet_lab.panels.lessons import recorded, timeline
from eet_lab.panels.lessons.prediction import Prediction
from eet_lab.panels.lessons.show import Shown, after, table
from eet_lab.panels.lessons.step_calls import everything_on
from eet_lab.panels.lessons.where import there
from eet_lab.technique import Recipe, registry


def left_over(guess: Prediction) -> Shown:
    """Where the rest of a step of our fastest recipe goes, and what attacks it."""
    return after(guess, _left_over)


def _left_over() -> Shown:
    best, apart = recorded.fastest(), recorded.fastest(without=TOGETHER)
    recipe, layers = Recipe.parse(apart.recipe, "cuda"), recorded.CONFIG.num_layers
    climbed = Recipe.parse(recorded.ladder().rungs[-1].measurement.recipe, "cuda")
    ends = counted(recipe.parts, [8], layers).beside - 1  # less the LM head, which has a row
    measured = apart.tpot_ms.p50 if apart.tpot_ms else 0.0
    beyond = sum(timeline.ours_us(rows) - timeline.floor_us(rows) for _, rows in timeline.layer_ops()) * layers / 1e3
    head = recorded.op(f"norm_linear/t1/n{recorded.CONFIG.vocab_size}/c{recorded.CONFIG.hidden_size}")
    beyond_head = (head.total_ms.p50 if head.total_ms else 0.0) - (head.floor_ms or 0.0)
    floor_ms = apart.floor_ms or 0.0
    alone = floor_ms + beyond + beyond_head
    lines = [
        ["weights, keys and values at the ceiling", f"{floor_ms:.3g} ms"],
        [f"the layers' {5 * layers} kernels, beyond their bytes", f"{beyond:.3g} ms"],
        ["the LM head, beyond its bytes", f"{beyond_head:.2g} ms"],
        ["sum of these, each op timed alone", f"{alone:.3g} ms"],
        ["the whole step (measured)", f"{measured:.3g} ms"],
    ]
    return Shown(
        there([apart, head]),
        table(["a token of GPT-2 XL, one row, our fastest recipe of five kernels a layer", ""], lines),
        table(
            ["what costs time", "what attacks it", "by"],
            [[*words, _by(name, recipe)] for *words, name in ATTACKS],
        ),
        f"Compare the last two lines of the first table: {_account(alone, measured, recipe)} Each of the "
        f"{5 * layers} kernels takes {beyond / 5 / layers * 1e3:.1f} us beyond its bytes when alone. {_chain(recipe)} "
        f"(Ops were timed one by one, attention at 1,024 columns{_others(apart, head)}, so the sum is not exact.)",
        f"Beside the LM head {ends} small launches stand around the layers, in no row of the first table: the "
        "embedding, the choice of a token and the step of the state read next to nothing, but each of them starts and "
        "ends as well. "
        f"{_few(recipe)} (In the sum, attention over more columns than the run had may make up for them.)",
        *_together(best, apart, layers),
        f"A step has {_counts({'counted above': everything_on(), 'the recorded ladder': climbed})}.",
    )


def _together(best: Row, apart: Row, layers: int) -> list[str]:
    """What becomes of the chain where most of a layer is one kernel."""
    if TOGETHER not in best.recipe or best.tpot_ms is None:
        return []
    return [
        f"{TOGETHER} makes {2 * layers + 1} kernels of those {5 * layers}: one goes on from one attention to the next, "
        f"and its weights keep coming while numbers are passed on. With it a token takes {best.tpot_ms.p50:.3g} ms. "
        f"{'' if apart.commit == best.commit else NEWER}"
        "Much of what is left above the floor is waiting of blocks for each other's results, on their way behind those "
        "weights. It takes one or two rows of a model as large as this one; the demo model runs as before."
    ]


def _others(step: Row, head: Row) -> str:
    """Whether what is compared with the step is as old as it."""
    ops = [head, *(row for _, rows in timeline.layer_ops() for row in rows if row.provider == recorded.OURS)]
    return "" if {row.commit for row in ops} == {step.commit} else " and partly with other versions of the kernels"


def _account(alone_ms: float, step_ms: float, recipe: Recipe) -> str:
    """How far the ops timed alone are off from the whole step, and what that says."""
    off = alone_ms / step_ms - 1
    if abs(off) < AGREE:
        return (
            f"they agree to {abs(off):.0%}, so nothing is hidden between the kernels: the time is in the chain itself."
        )
    sides = f"the ops alone sum to {abs(off):.0%} {'more' if off > 0 else 'less'} than the whole step"
    if off < 0:
        return f"{sides}, so {step_ms - alone_ms:.2g} ms of it pass between the kernels."
    if "dependent_launch" in recipe.names:
        return f"{sides}, so about {alone_ms - step_ms:.2g} ms of them are hidden by starting early."
    return f"{sides}, so {alone_ms - step_ms:.2g} ms of them are no part of it."


def _chain(recipe: Recipe) -> str:
    """What a kernel waits for in this recipe."""
    if "dependent_launch" in recipe.names:
        return (
            "In the step each starts early, computes addresses and asks for its weights, but waits "
            "until the last block of the one before has ended before it reads its inputs."
        )
    return (
        "One after the other waits until the last block of the one before has ended, starts, computes addresses, reads "
        "its inputs, and only then asks for its weights; meanwhile the memory is idle."
    )


def _few(recipe: Recipe) -> str:
    """What fused_sampling has to do with the launches around the layers."""
    if "fused_sampling" in recipe.names:
        return "Without fused_sampling there are more of them."
    return "They are what fused_sampling attacks."


def _counts(recipes: Mapping[str, Recipe]) -> str:
    """How many kernels each recipe has, and where it stands; those that have the same are told once."""
    places: dict[str, list[str]] = {}
    for place, recipe in recipes.items():
        places.setdefault(_with_ends(recipe), []).append(place)
    return ", ".join(f"{words} ({' and '.join(where)})" for words, where in places.items())


def _with_ends(recipe: Recipe) -> str:
    """How many kernels a step of one row has in the layers, and how many before and after these."""
    total, beside = num_kernels(recipe.parts, (8,), recorded.CONFIG), counted(recipe.parts, [8], 1).beside
    return f"{total - beside} kernels in the layers and {beside} around them, which makes {total}"


TOGETHER = "persistent_layers"
AGREE = 0.03
"""Two times that differ by less are called the same."""
NEWER = "(It was measured with newer kernels than the table above, so not all of the difference is its own.) "
ATTACKS = (
    ("Python and PyTorch between launches", "record the step once, replay it with one call", "cuda_graphs"),
    ("a start and an end for each launch", "fewer launches: one kernel does what several did", "fused_kernels"),
    ("a dozen small launches around the layers", "embed, choose and move on in one launch each", "fused_sampling"),
    (
        "end of one kernel, start of the next, its first instructions",
        "let the next kernel start early and ask for its weights before it waits (programmatic dependent launch)",
        "dependent_launch",
    ),
    (
        "four products of a layer that wait for each other's last block",
        "one kernel that goes on through them, and through its weights",
        "persistent_layers",
    ),
    ("the bytes themselves", "smaller weights: the floor moves", "int8_weights"),
    ("all weights are read for a single row", "more rows a step: see the exercise", ""),
)
"""Where a step's time goes beside arithmetic, what is done about it, and by which technique."""


def _by(name: str, recipe: Recipe) -> str:
    """The technique's name, marked if the recipe has it already; a dash where there is none of it here."""
    if not name:
        return "more prompts"
    if name not in registry():
        return "–"
    return f"{name} (on already)" if name in recipe.names else name
