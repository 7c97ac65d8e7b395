"""A ladder: what each rung changed and how sure that is, and static figures of what it takes away."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from eet_lab.bench import Ladder, Measurement, Rung
from eet_lab.bench.measured import p50
from eet_lab.bench.paired import DETAILS, KINDS, LEAST_PAIRS, SURE_PAIRS, Change, Kind, Verdict
from eet_lab.bench.train_compare import TrainComparison, TrainLadder
from eet_lab.figures import theme
from eet_lab.figures.theme import rounded
from eet_lab.technique import known
from eet_lab.words import brief, counted, ms_words, plain, signed, times

COLORS: dict[Verdict, str] = {"better": theme.GAIN, "worse": theme.LOSS, "cannot tell apart": theme.UNSURE}
OPPOSITE: dict[Verdict, Verdict] = {"better": "worse", "worse": "better"}
LEAST_SHARE = 0.04
"""The shortest bar, as a share of the longest: what there is can be seen."""


@dataclass(frozen=True)
class OwnTime:
    """A rung's time, end to end, against that of another: `ms` more, leading to between `low_level` and `high_level`.

    The interval is that of `num_pairs` paired runs. Without any it is the range that two blocks of repeats allow, which
    is no guard against a machine that drifts between them.
    """

    ms: float
    low_level: float
    high_level: float
    verdict: Verdict
    words: str
    num_pairs: int

    @classmethod
    def of(cls, rung: Rung, before: Measurement) -> OwnTime:
        """How a rung differs from the measurement that it is compared with."""
        was, delta = before.total_ms, rung.delta_ms
        level, ms = was.p50 if was else 0.0, delta.p50 if delta else 0.0
        change = rung.change
        if change is not None and change.num_pairs:  # else two medians stand alone
            return cls.of_pairs(change, level, ms, rung.details)
        low, high = (level + delta.p20, level + delta.p80) if delta else (level, level)
        verdict: Verdict = "cannot tell apart" if low <= level <= high else "better" if ms < 0 else "worse"
        return cls(ms, low, high, verdict, _words(verdict, level, ms, low, high), num_pairs=0)

    @classmethod
    def of_pairs(cls, change: Change, level: float, ms: float, details: str = "") -> OwnTime:
        """`ms` more than `level`, in the interval of paired runs."""
        low, _, high = change.delta
        words = "; ".join(filter(None, (change.words("total_ms"), details)))
        return cls(ms, level + low, level + high, change.verdict, words, change.num_pairs)

    @property
    def color(self) -> str:
        return COLORS[self.verdict]

    @property
    def opposite(self) -> str:
        """The colour where a technique is taken away: what becomes slower without it was worth it."""
        return COLORS[OPPOSITE.get(self.verdict, self.verdict)]


def _words(verdict: Verdict, level: float, ms: float, low: float, high: float) -> str:
    between = f"from {signed(low - level, 3)} to {signed(high - level, 3)} ms, not paired"
    if verdict == "cannot tell apart" or not level or level + ms <= 0:
        return f"cannot tell apart ({between})"
    ratio = level / (level + ms) if ms < 0 else (level + ms) / level
    return f"{times(ratio)} {'faster' if ms < 0 else 'slower'} ({between})"


@dataclass(frozen=True)
class Effect:
    """What a technique brought in a ladder, for one row of a list.

    `share` of the row's bar, from -1 (saves time) to 1 (costs time): square roots, since the largest effect is
    thousands of times the smallest. `detail` names a part of the run that changed where the whole cannot be told apart.
    """

    text: str
    kind: Kind
    share: float
    tip: str
    detail: str = ""


def effects(ladder: Ladder) -> dict[str, Effect]:
    """Each technique's own share of the way from the baseline to the full recipe, by its name.

    What came along with another technique has no rung of its own, and says so.
    """
    found: dict[str, Effect] = {}
    steps = [(rung, OwnTime.of(rung, before.measurement), before) for before, rung in pairwise(ladder.rungs)]
    most = max((abs(step.ms) for _, step, _ in steps), default=0.0)
    for rung, step, before in steps:
        kind = KINDS[step.verdict]
        text = "cannot tell apart" if kind == "dim" else f"{signed(step.ms, 3)} ms"
        size = max(math.sqrt(abs(step.ms) / most), LEAST_SHARE) if most and kind != "dim" else 0.0
        was, now = (p50(each.measurement.total_ms) or 0.0 for each in (before, rung))
        tip = f"end to end: {brief(was)} → {ms_words(now)}; {step.words}"
        parts = [f"{DETAILS[key]} {change.word(key)}" for key, change in rung.told.items()]
        detail = ", ".join(parts) if kind == "dim" else ""
        found[rung.technique] = Effect(text, kind, round(math.copysign(size, step.ms), 3), tip, detail)
        for name in rung.along:
            found[name] = Effect(f"with {rung.title}", "dim", 0.0, f"Added together with {rung.title}, which needs it.")
    return found


ROOMS = [1 + tenth / 10 for tenth in range(2, 11)]
"""How much longer the axis may be than the longest bar, which has its label there."""
NARROW_PX, CHARACTER_PX = 240, 5.8
"""The plot in a window 500 px wide, and a character of a label."""
SMALL_PX, REMARK_WIDTH, RULE_WIDTH = 10, 64, 58
"""Small words, and characters of a line of them: above the bars, and below the axis, centred on what names leave."""


def waterfall(result: Ladder, log: bool | None = None) -> go.Figure:
    """What each technique takes away of the time, end to end, from the baseline to the full recipe. The steps add up.

    Bars lie one below the other, so that names and labels can be read in a window 500 px wide. `log`: on a logarithmic
    axis, where a step's length is a ratio; None: where the ends are more than theme.FAR apart.
    """
    steps = [OwnTime.of(rung, before.measurement) for before, rung in pairwise(result.rungs)]
    levels = [p50(rung.measurement.total_ms) or 0.0 for rung in result.rungs]
    title, rule = "Who saves what: change of time, end to end", _rule(steps, result.rungs[0].measurement.repeats)
    return _falling(title, titles(result.rungs), levels, steps, _explained(result, steps), rule, log)


def training_waterfall(found: TrainLadder, log: bool | None = None) -> go.Figure:
    """What each technique takes away of a step of training, from none to all. The steps add up. `log` is as above."""
    changes = [rung.found.change for rung in found.rungs if rung.found.change is not None]
    levels = [*(change.before for change in changes[:1]), *(change.after for change in changes)]
    steps = [OwnTime.of_pairs(each, was, now - was) for each, (was, now) in zip(changes, pairwise(levels), strict=True)]
    names = ["no technique", *(rung.title for rung in found.rungs)]
    return _falling("Who saves what: change of a training step", names, levels, steps, {}, _rule(steps), log)


def loss_curves(found: TrainComparison) -> go.Figure:
    """The loss of each step by both recipes, the selection's upon the baseline's: one line where they are the same."""
    fig = theme.figure(f"Same loss curve? {found.verdict.capitalize()}", height=320, legend=theme.LEGEND_BELOW)
    for side, color, width in ((found.baseline, theme.BASELINE, 6), (found.selection, theme.SELECTION, 1.5)):
        name = theme.words(textwrap.shorten(side.recipe.replace(",", " + "), REMARK_WIDTH, placeholder=" …"))
        fig.add_scatter(
            x=[step.number + 1 for step in side.steps], y=rounded(side.losses), mode="lines", name=name,
            line={"color": color, "width": width}, hovertemplate="step %{x}: loss %{y}<extra></extra>",
        )  # fmt: skip
    fig.update_xaxes(title="step")
    fig.update_yaxes(title="nats a label")
    return fig


def _falling(
    title: str, names: Sequence[str], levels: Sequence[float], steps: Sequence[OwnTime],
    remarks: Mapping[int, str], rule: str, log: bool | None = None,
) -> go.Figure:  # fmt: skip
    """Bars from the first level to the last, with what each step is beside it, and the rule of the whiskers below."""
    names = [*names, "all of it"]
    log = theme.is_far(levels) if log is None else log
    floor = _floor(levels) if log else 0.0
    ends = [(floor, levels[0]), *pairwise(levels), (floor, levels[-1])]
    tips = [ms_words(levels[0]), *(_tip(step, *pair) for step, pair in zip(steps, ends[1:], strict=False))]
    places = list(range(len(names)))
    for at, remark in remarks.items():
        tips[at] += f"<br>{theme.words(remark, REMARK_WIDTH)}"
    fig = theme.figure(title, height=110 + 26 * len(names), bargap=0.28)
    if remarks:
        _add_remark(fig, remarks[max(remarks, key=lambda at: steps[at - 1].ms)])
    fig.add_bar(
        y=places, base=rounded(map(min, ends)), x=rounded(abs(a - b) for a, b in ends), orientation="h",
        marker=_painted([theme.BASELINE, *(step.color for step in steps), theme.SELECTION]),
        customdata=[*tips, ms_words(levels[-1])],
        text=[theme.words(name) for name in names], textposition="none",
        hovertemplate="<b>%{text}</b>: %{customdata}<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(y=places[1:-1], x=rounded(levels[1:]), **_whiskers(steps, levels[1:], floor))
    lows = [0.0, *(max(min(*pair, step.low_level), floor) for pair, step in zip(ends[1:], steps, strict=False)), 0.0]
    highs = [levels[0], *(max(*pair, step.high_level) for pair, step in zip(ends[1:], steps, strict=False)), levels[-1]]
    labels = [brief(levels[0]), *map(_label, steps), brief(levels[-1])]
    end, before = _sides(lows, highs, labels, floor)
    labels = [*map(_bold, labels)]
    fig.add_scatter(
        y=places, x=rounded(low if left else high for low, high, left in zip(lows, highs, before, strict=True)),
        mode="text", text=[f"{label}  " if left else f"  {label}" for label, left in zip(labels, before, strict=True)],
        textposition=[f"middle {'left' if left else 'right'}" for left in before], textfont={"size": 11},
        cliponaxis=False, hoverinfo="skip",
    )  # fmt: skip
    fig.update_yaxes(
        showgrid=False, zeroline=False, tickvals=places, ticktext=[theme.words(name) for name in names],
        tickfont={"size": 11}, range=[len(names) - 0.4, -0.6],
    )  # fmt: skip
    axis = theme.axis(floor, end, "ms", log)
    fig.update_xaxes({**axis, "title": _below(axis["title"], rule)}, tickangle=0, tickfont={"size": 11})
    return fig.update_layout(showlegend=False, margin={"b": 8})  # what stands below the axis takes its own room


def _add_remark(fig: go.Figure, text: str) -> None:
    """Small lines below the title; their height is that of the small words, and not of the title's."""
    title, lines = fig.layout.title, textwrap.wrap(text, REMARK_WIDTH)
    head = f'<span style="font-size:{title.font.size}px">{title.text}</span>'
    title.update(text="<br>".join([head, *map(escape, lines)]), font={"size": SMALL_PX}, pad={"t": theme.FIRST_LINE_PX})
    fig.layout.margin.t = 30 + math.ceil(1.3 * SMALL_PX) * len(lines)


def _sides(
    lows: Sequence[float], highs: Sequence[float], labels: Sequence[str], floor: float
) -> tuple[float, list[bool]]:
    """Where the axis ends, and which labels stand before their bars: each has its room, also in a narrow window."""
    most, end, before = max(highs), 0.0, list[bool]()
    for room in ROOMS:
        end = floor * (most / floor) ** room if floor else room * most
        left = [NARROW_PX * _share(low, floor, end) for low in lows]
        right = [NARROW_PX * (1 - _share(high, floor, end)) + theme.TOOLBAR_PX for high in highs]
        before = [one > other for one, other in zip(left, right, strict=True)]
        widths = [CHARACTER_PX * len(label) for label in labels]
        if all(max(sides) > width for *sides, width in zip(left, right, widths, strict=True)):
            break
    return end, before


def _share(level: float, floor: float, end: float) -> float:
    """Where on the axis from `floor` to `end` a level lies, from 0 to 1; a logarithmic axis has a floor above 0."""
    if level <= floor:
        return 0.0
    return math.log(level / floor) / math.log(end / floor) if floor else level / end


def _below(title: str, rule: str) -> dict[str, Any]:
    """An axis's title with the rule by which a step is told from noise below it."""
    text = "<br>".join([title, *map(escape, textwrap.wrap(rule, RULE_WIDTH))])
    return {"text": text, "font": {"size": SMALL_PX}, "standoff": 4}


def left_out(result: Ladder, log: bool | None = None) -> go.Figure:
    """What the full recipe takes without each technique: these do not add up, since techniques help each other.

    Bars run from the full recipe's time to the time without one, `log` as for `waterfall`.
    """
    full = result.rungs[-1].measurement
    rungs = [rung for rung in result.left_out if rung.delta_ms is not None]
    steps, level = [OwnTime.of(rung, full) for rung in rungs], p50(full.total_ms) or 0.0
    without = [p50(rung.measurement.total_ms) or 0.0 for rung in rungs]
    log = theme.is_far([level, *without]) if log is None else log
    lows = [low for low in (level, *without, *(step.low_level for step in steps)) if low > 0]
    floor = 0.9 * min(lows) if log else 0.0
    fig = theme.figure("The full recipe without one of them", height=106 + 30 * len(rungs), bargap=0.3)
    gone = [" and ".join([rung.title, *(known(name).title for name in rung.along)]) for rung in rungs]
    names = [f"without {theme.words(name)}" for name in gone]
    tips = [_tip(step, level, end) for step, end in zip(steps, without, strict=True)]
    fig.add_bar(
        y=names, base=rounded(min(level, end) for end in without), x=rounded(abs(end - level) for end in without),
        orientation="h", marker=_painted([step.opposite for step in steps]), customdata=tips,
        hovertemplate="<b>%{y}</b>: %{customdata}<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(x=rounded(without), y=names, **_whiskers(steps, without, floor))
    ends = [max(level, end, step.high_level) for end, step in zip(without, steps, strict=True)]
    fig.add_scatter(
        x=rounded(ends), y=names, mode="text", text=[f"  {_bold(_label(step))}" for step in steps],
        textposition="middle right", textfont={"size": 11}, cliponaxis=False, hoverinfo="skip",
    )  # fmt: skip
    fig.add_vline(x=level, line={"color": theme.INK, "width": 1})
    title = f"ms; the line is the full recipe ({brief(level)})"
    axis = theme.axis(floor, max([level, *ends]), title, log, room=1.3)
    fig.update_xaxes({**axis, "title": _below(axis["title"], _rule(steps, full.repeats))})
    fig.update_yaxes(autorange="reversed", showgrid=False, tickfont={"size": 11})
    return fig.update_layout(showlegend=False)


def titles(rungs: Sequence[Rung]) -> list[str]:
    """The rungs' names."""
    return [rung.title if i or rung.technique else "baseline" for i, rung in enumerate(rungs)]


def _label(step: OwnTime) -> str:
    """The difference in ms, or that there is none to tell."""
    if step.verdict == "cannot tell apart":
        return f"cannot tell apart ({signed(step.ms, 3)})"
    return signed(step.ms, 3)


def _bold(label: str) -> str:
    """A number; not what cannot be told apart."""
    return label if label.startswith("cannot") else f"<b>{label}</b>"


def _tip(step: OwnTime, before: float, after: float) -> str:
    return f"{brief(before)} → {ms_words(after)}<br>{theme.words(step.words)}"


def _painted(colors: Sequence[str]) -> dict[str, Any]:
    """A bar of no height is a line still."""
    return {"color": colors, "line": {"color": colors, "width": 2}}


def _whiskers(steps: Sequence[OwnTime], ends: Sequence[float], floor: float) -> dict[str, Any]:
    """Marks of no size where each step leads, with the interval of that."""
    far = {"type": "data", "symmetric": False, "color": theme.INK, "thickness": 1.3, "width": 4}
    far["array"] = rounded(max(step.high_level - end, 0) for step, end in zip(steps, ends, strict=True))
    far["arrayminus"] = rounded(max(end - max(step.low_level, floor), 0) for step, end in zip(steps, ends, strict=True))
    return {"mode": "markers", "marker": {"size": 1, "color": theme.INK}, "hoverinfo": "skip", "error_x": far}


def _explained(result: Ladder, steps: Sequence[OwnTime]) -> dict[int, str]:
    """Why a red bar is red, as far as what Python launches for a token tells, and whether it pays in the end."""
    found = dict[int, str]()
    for at, ((before, rung), step) in enumerate(zip(pairwise(result.rungs), steps, strict=True), 1):
        if step.verdict != "worse":
            continue
        old, new = (_launches(each) for each in (before, rung))
        why = f"{plain(new)} launches per token, up from {plain(old)}" if old and new and new > old else ""
        without = next((each for each in result.left_out if each.technique == rung.technique), None)
        if without is not None:
            why += f"{'; ' if why else ''}{_in_the_end(OwnTime.of(without, result.rungs[-1].measurement))}"
        if why:
            found[at] = f"{rung.title} slower here: {why}"
    return found


def _in_the_end(step: OwnTime) -> str:
    """What it is to the full recipe to be without a technique that was slower on its rung."""
    if step.verdict == "cannot tell apart":
        return "in the full recipe it makes no measurable difference"
    without = f"the full recipe is {ms_words(abs(step.ms))}"
    return f"{without} {'slower without it, so there it pays' if step.verdict == 'worse' else 'faster without it'}"


def _rule(steps: Sequence[OwnTime], num_repeats: int = 0) -> str:
    """By what rule a step is told from noise."""
    if not steps:
        return ""
    fewest = min(step.num_pairs for step in steps)
    if not fewest:
        repeats = counted(num_repeats, "repeat")
        return f"not paired: whiskers are the range that {repeats} of each allow; grey: cannot tell apart"
    if fewest < LEAST_PAIRS:
        return f"{counted(fewest, 'pair')} cannot tell anything apart: that takes {LEAST_PAIRS}"
    if fewest < SURE_PAIRS:
        return (
            f"whiskers: range of all {fewest} pairs; grey: cannot tell apart, because the range contains 0 or is wider "
            "than its gap to 0"
        )
    return "whiskers: interval of the paired differences; grey: cannot tell apart"


def _launches(rung: Rung) -> float | None:
    cost = rung.measurement.cost
    return cost.launches_per_token if cost else None


def _floor(levels: Sequence[float]) -> float:
    """Where bars begin on a logarithmic axis: the shortest has a tenth of the width."""
    low, high = min(levels), max(levels)
    return float(f"{low / max((high / low) ** 0.12, 1.3):.3g}")
