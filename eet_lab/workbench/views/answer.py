"""The answer: four tiles, a headline for the bar, and the tabs that tell the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eet_lab.bench import Comparison, Ladder, Measurement, Parity, Run
from eet_lab.bench.measured import MiB, p50
from eet_lab.bench.paired import Change, memory_words
from eet_lab.bench.tables import layout
from eet_lab.figures.results import kinds, other_side
from eet_lab.labels import names_of, short_form, with_labels
from eet_lab.models.loading import RANDOM_LABEL
from eet_lab.words import brief, counted, percent, plain
from eet_lab.workbench.rows import Result

TITLES = {
    "waterfall": "Who saves what",
    "left_out": "Left out",
    "latency": "Latency",
    "tokens": "Tokens",
    "timeline": "Timeline",
    "memory": "Peak memory",
    "arena": "Where memory lay",
    "planners": "Planners, KV cache",
    "parity": "Same output?",
    "texts": "Texts",
    "table": "Table",
}
EXPORTS = (
    {"name": "json", "label": "JSON"},
    {"name": "csv", "label": "CSV"},
    {"name": "html", "label": "page"},
)
TRACE = {"name": "trace", "label": "trace"}
VERDICTS = {
    "identical": ("identical", "same text", "good"),
    "within rounding": ("within rounding", "same within rounding", "good"),
    "lossy": ("lossy", "output lossy, within its bound", "warn"),
    "different": ("different", "OUTPUT DIFFERENT", "bad"),
}
"""A parity check's verdicts: the word of the tile, that of the headline, and the colour."""
RANDOM = "Random weights: token ids, the text means nothing."
LEAST_SHARE = 0.02
"""A share of the peak. A smaller change decides nothing about what fits: it is neither good nor bad, and needs no
reason.
"""
TIMED = {
    "ttft_ms": ("Time to first token", "ms"),
    "tpot_ms": ("Time per token", "ms"),
    "total_ms": ("End to end", "ms"),
    "tokens_per_s": ("Throughput", "tokens/s"),
}
SHORT = {"ttft_ms": "first token", "tpot_ms": "per token", "total_ms": "end to end"}
"""What the headline calls them, as far as it tells them."""
UNTOLD = "cannot tell apart"
GENERATES, READS = ("ttft_ms", "tpot_ms"), ("total_ms", "tokens_per_s")
"""The times that tiles tell: of what is generated, and of an encoder, which has no first token."""
PEAK_TIP = (
    "Weights, KV cache, activations and workspaces at their peak. Bytes are counted, not sampled. "
    f"A change below {percent(LEAST_SHARE)} of the peak is grey: it decides nothing about what fits."
)
HOW = (
    "A faster engine with a different output is no optimization. So each recipe is checked before any timing. Its "
    "logits, teacher-forced with the tokens of {other}, are compared with a reference in higher precision. They may "
    "differ only by what another order of the same sums explains. A lossy recipe changes the weights: it must compute "
    "what plain PyTorch computes with these weights, and may differ from {other} by a stated bound."
)


def ends(result: Result) -> tuple[Measurement, Measurement] | None:
    """The two that a result is about: baseline and selection, first and last rung; None of a run or a lone rung."""
    if isinstance(result, Comparison):
        return result.baseline, result.selection
    rungs = result.rungs if isinstance(result, Ladder) else ()
    return (rungs[0].measurement, rungs[-1].measurement) if len(rungs) > 1 else None


def parity(result: Comparison | Ladder) -> Parity:
    """The parity check of what a result is about."""
    return result.parity if isinstance(result, Comparison) else result.rungs[-1].parity


def tabs(result: Result | None, has_arena: bool, has_timeline: bool) -> list[dict[str, str]]:
    """The tabs that a result has, the most telling first."""
    if result is None:
        return []
    arena = ["arena", "planners"] if has_arena else []
    if isinstance(result, Run):
        names = ["texts", *arena, "table"]
    else:
        drawn = list(kinds(result))
        names = [*drawn[:2], *(["timeline"] if has_timeline else []), *drawn[2:], *arena, "texts", "table"]
    return [{"name": name, "title": TITLES[name]} for name in names]


def tiles(result: Result) -> list[dict[str, Any]]:
    """First token, time per token, peak memory, same output: each with how much, and whether noise explains it.

    An encoder's have the time end to end and the throughput, and its vectors.
    """
    if isinstance(result, Run):
        return _run_tiles(result)
    pair = ends(result)
    if pair is None:
        return []
    before, after = pair
    found = parity(result)
    word, _, kind = VERDICTS[found.verdict]
    changes = {key: {"text": change.words(key), "kind": change.kind} for key, change in result.all_changes.items()}
    tips = {key: _how(change) for key, change in result.all_changes.items()}
    if after.cost and (floor := after.cost.floor_ms):
        told = f"The floor, at the rate of a streaming read, is {brief(floor)} ms."
        tips["tpot_ms"] = " ".join(filter(None, [tips.get("tpot_ms"), told]))
    memory = memory_change(before.memory["peak"], after.memory["peak"])
    return [
        *_times(before, after, READS if result.reads else GENERATES, changes, tips),
        _memory(before, after, memory, PEAK_TIP),
        _vectors(found) if result.reads else _same(before, after, {"text": word, "kind": kind}, found.explanation),
    ]


def headline(result: Result) -> list[dict[str, str]]:
    """The answer in a line, for the bar."""
    if isinstance(result, Run):
        m = result.measurement
        known = [(p50(m.ttft_ms), "first token after {} ms"), (p50(m.tpot_ms), "{} ms per token")]
        return [{"text": text.format(brief(ms)), "kind": "plain"} for ms, text in known if ms is not None]
    pair = ends(result)
    if pair is None:
        return []
    changes = result.all_changes
    parts = []
    for key in (key for key in _headlines(changes, result.reads) if key in changes):
        text, name = changes[key].short(key), SHORT[key]
        parts.append({"text": f"{name} {text}" if text[0].isdigit() else f"{name}: {text}", "kind": changes[key].kind})
    memory = memory_change(pair[0].memory["peak"], pair[1].memory["peak"])
    text, kind = VERDICTS[parity(result).verdict][1:]
    return [*parts, {**memory, "text": f"memory {memory['text']}"}, {"text": text, "kind": kind}]


def _headlines(changes: Mapping[str, Change], reads: bool) -> Sequence[str]:
    """Which times the headline tells: the time end to end, too, where those of its parts do not say how it changed.

    A time per token that cannot be told makes room for it.
    """
    if reads:
        return ("total_ms",)
    first, each, whole = (changes[key].verdict if key in changes else UNTOLD for key in SHORT)
    if whole == UNTOLD or (whole == each and first in (UNTOLD, whole)):
        return GENERATES
    return ("ttft_ms", "total_ms") if each == UNTOLD else tuple(SHORT)


def about(result: Result) -> str:
    """What the answer is of: which recipes, how many prompts, how often, and whether something was unsteady."""
    device = result.environment.device_kind
    prompts = counted(len(result.prompts), "text" if result.reads else "prompt")
    if isinstance(result, Run):
        return f"{short_form(result.recipe, device)} · {prompts} · watched once"
    pair = ends(result)
    if pair is None:
        return prompts
    before, after = (short_form(m.recipe, device) for m in pair)
    change = next(iter(result.all_changes.values()), None)
    pairs = [counted(change.num_pairs, "pair") if change.num_pairs else "not timed in pairs"] if change else []
    pairs += ["more pairs could tell"] if any(each.needs_pairs for each in result.all_changes.values()) else []
    unsteady = ["unsteady machine, see the table"] if any(m.warnings for m in pair) else []
    return " · ".join([f"{after} against {before}", prompts, *pairs, *unsteady])


def memory_change(before: int, after: int) -> dict[str, str]:
    """Memory is counted, so any difference is one; it has a colour from `LEAST_SHARE` on."""
    little = abs(after - before) < LEAST_SHARE * before
    return {"text": memory_words(before, after), "kind": "dim" if little else "good" if after < before else "bad"}


def grown(result: Comparison) -> str:
    """Why the peak is higher, where activations are: a technique that saves time may pay with memory; "" else."""
    before, after = result.baseline.memory, result.selection.memory
    more = after.get("activations", 0) - before.get("activations", 0)
    if after["peak"] < (1 + LEAST_SHARE) * before["peak"] or more < (after["peak"] - before["peak"]) / 2:
        return ""
    why = "; ".join(_wider(result))
    return f"Activations take {brief(more / MiB)} MiB more{why and f': {why}'}. Ladder shows which technique costs it."


def _wider(result: Comparison) -> Iterator[str]:
    """What the recipes tell of wider activations; nothing where they do not tell it."""
    had, has = names_of(result.baseline.recipe), names_of(result.selection.recipe)
    if "pre_padding" in has - had:
        yield "a pass over whole prompts is wider than one over single tokens"
    if "packed_prefill" in had - has and len(set(result.prompt_lengths)) > 1:
        yield "packed prefill had left out the pads of shorter prompts"
    if "mask_removal" in had - has:
        yield "each pass builds a mask"


def table(result: Result) -> dict[str, Any]:
    """The same table as in a cell or a terminal, its recipes as labels."""
    _, (head, *rows), notes = layout(result)
    if not isinstance(result, Ladder):
        device, of = result.environment.device_kind, [result] if isinstance(result, Run) else ends(result) or ()
        recipes = [each.recipe for each in of]
        head = ["", *(short_form(recipe, device) for recipe in recipes), *head[len(recipes) + 1 :]]
    return {"head": head, "rows": rows, "notes": [with_labels(note, result.environment.device_kind) for note in notes]}


def words(result: Result, tab: str) -> list[dict[str, str]]:
    """What stands in words on a tab."""
    if tab == "texts":
        return _texts(result)
    if tab != "parity" or isinstance(result, Run):
        return []
    if isinstance(result, Comparison):
        found = [("", result.parity)]
    else:
        found = [(f"{rung.title}: ", rung.parity) for rung in result.rungs[1:]]
    told = [
        {"text": f"{name}{each.verdict}. {each.explanation}", "kind": VERDICTS[each.verdict][2]} for name, each in found
    ]
    return [*told, {"text": HOW.format(other=other_side(result)), "kind": "dim"}]


def meaningless(result: Result) -> str:
    """That what was generated says nothing, where weights are random; "" else."""
    return RANDOM if result.environment.model_label.endswith(RANDOM_LABEL) else ""


def _texts(result: Result) -> list[dict[str, str]]:
    pair = ends(result)
    m = result.measurement if isinstance(result, Run) else pair and pair[1]
    if not m:
        return []
    told = "" if result.reads else meaningless(result)
    if told or result.reads:
        what = "Text" if result.reads else "Prompt"
        lengths = enumerate(result.prompt_lengths, 1)
        heads = [f"{what} {number}: {counted(length, 'token')}" for number, length in lengths]
        texts: Sequence[str] = [" ".join(map(str, row)) for row in m.tokens] if told else m.texts
    else:
        heads, texts = [*result.prompts], result.texts if isinstance(result, Run) else m.texts
    found = [{"heading": head, "text": text} for head, text in zip(heads, texts, strict=False)]
    return [{"heading": "", "text": told, "kind": "warn"}, *found] if told else found


def _tile(
    label: str, value: str | float | None, unit: str, change: dict[str, str], before: str = "", tip: str = ""
) -> dict[str, Any]:
    shown = "–" if value is None else value if isinstance(value, str) else brief(value)
    return {"label": label, "value": shown, "unit": unit, "before": before, "change": change, "tip": tip}


def _times(
    before: Measurement,
    after: Measurement,
    keys: Sequence[str],
    changes: Mapping[str, dict[str, str]],
    tips: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    """A tile for each time, with what is told of its change."""
    for key in keys:
        label, unit = TIMED[key]
        was, now = p50(getattr(before, key)), p50(getattr(after, key))
        told = changes.get(key, {"text": "", "kind": "dim"})
        yield _tile(label, now, unit, told, "" if was is None else f"from {brief(was)}", tips.get(key, ""))


def _how(change: Change) -> str:
    """Where the numbers of a tile come from."""
    if not change.num_pairs:
        return "Medians, and their ratio."
    if change.is_of_pairs:
        return "Medians. A drift has moved them apart, so × is the median of the paired ratios, with its interval."
    told = "Medians and their ratio; in brackets, the interval of the paired ratios, which tells it from noise."
    more = f" One slow run widens an interval of {change.num_pairs} pairs: more pairs of runs could tell."
    return f"{told}{more if change.needs_pairs else ''}"


def _memory(before: Measurement, after: Measurement, change: dict[str, str], tip: str = "") -> dict[str, Any]:
    was, now = before.memory["peak"] / MiB, after.memory["peak"] / MiB
    return _tile("Peak memory", now, "MiB", change, f"from {brief(was)}", tip)


def _same_tokens(before: Measurement, after: Measurement) -> tuple[int, int]:
    """How many tokens are the same, and of how many."""
    rows = zip(after.tokens, before.tokens, strict=True)
    pairs = [pair for ours, theirs in rows for pair in zip(ours, theirs, strict=False)]
    return sum(a == b for a, b in pairs), len(pairs)


def _same(before: Measurement, after: Measurement, change: dict[str, str], tip: str = "") -> dict[str, Any]:
    same, total = _same_tokens(before, after)
    return _tile("Same output?", f"{same:,} / {total:,}", "tokens", change, tip=tip)


def _vectors(found: Parity) -> dict[str, Any]:
    """What is compared of an encoder: how far its vectors are off those in fp32."""
    word, _, kind = VERDICTS[found.verdict]
    off = "–" if found.max_error is None else plain(found.max_error, 2)
    change, tip = {"text": word, "kind": kind}, found.explanation
    return _tile("Same vectors?", off, "off fp32", change, f"at most {plain(found.budget, 2)}", tip)


def tiles_apart(first: Measurement, second: Measurement, of_others: str, reads: bool = False) -> list[dict[str, Any]]:
    """The tiles of two runs that were not timed in turn: no change is claimed of times, nor any of what is `of_others`.

    That is "of other prompts" or "of other models", or "". `reads`: they are an encoder's, whose vectors are not kept.
    """
    apart = {"text": of_others or "not timed in turn", "kind": "dim"}
    times = _times(first, second, READS if reads else GENERATES, dict.fromkeys(TIMED, apart), {})
    if of_others:
        same_what = "Same vectors?" if reads else "Same output?"
        return [*times, _memory(first, second, apart), _tile(same_what, None, "", apart)]
    same, total = _same_tokens(first, second)
    unknown = {"text": "not checked", "kind": "dim"}
    told = {"text": "identical", "kind": "good"} if same == total else unknown
    output = _tile("Same vectors?", None, "", unknown) if reads else _same(first, second, told)
    memory = memory_change(first.memory["peak"], second.memory["peak"])
    return [*times, _memory(first, second, memory), output]


def _run_tiles(run: Run) -> list[dict[str, Any]]:
    m = run.measurement
    first, each, _, throughput = ((label, p50(getattr(m, key)), unit) for key, (label, unit) in TIMED.items())
    values = first, each, ("Peak memory", m.memory["peak"] / MiB, "MiB"), throughput
    note = {"text": "stopped" if run.stopped else "one run, no interval", "kind": "dim"}
    tip = "For numbers to compare, press Compare."
    return [_tile(label, value, unit, note, tip=tip) for label, value, unit in values]
