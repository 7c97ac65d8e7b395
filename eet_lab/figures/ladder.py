"""A ladder: what each rung changed and how sure that is, and static figures of what it takes away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import copysign, sqrt
from typing import Any

import plotly.graph_objects as go

from eet_lab.bench import Ladder, Measurement, Rung
from eet_lab.bench.measured import p50
from eet_lab.bench.paired import DETAILS, KINDS, LEAST_PAIRS, SURE_PAIRS, Change, Kind, Verdict
from eet_lab.bench.train_compare import TrainLadder
from eet_lab.figures import theme
from eet_lab.figures.theme import rounded
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
        size = max(sqrt(abs(step.ms) / most), LEAST_SHARE) if most and kind != "dim" else 0.0
        was, now = (p50(each.measurement.total_ms) or 0.0 for each in (before, rung))
        tip = f"end to end: {brief(was)} → {ms_words(now)}; {step.words}"
        parts = [f"{DETAILS[key]} {change.word(key)}" for key, change in rung.told.items()]
        detail = ", ".join(parts) if kind == "dim" else ""
        found[rung.technique] = Effect(text, kind, round(copysign(size, step.ms), 3), tip, detail)
        for name in rung.along:
            found[name] = Effect(f"with {rung.title}", "dim", 0.0, f"Added together with {rung.title}, which needs it.")
    return found


NAME_WIDTH = 11
"""Characters of a rung's name in a line: eleven columns share 800 pixels."""
REMARK_WIDTH = 84
LINE_PX, LINE_SHARE = 14, 0.1
"""The height of a line of text above the bars; its share is that of the least height, 260 pixels."""
GAP = 0.015
"""The share of the axis between a bar and its label."""


def waterfall(result: Ladder, log: bool | None = None) -> go.Figure:
    """What each technique takes away of the time, end to end, from the baseline to the full recipe. The steps add up.

    `log`: on a logarithmic axis, where a step's height is a ratio; None: where the ends are more than theme.FAR apart.
    """
    steps = [OwnTime.of(rung, before.measurement) for before, rung in pairwise(result.rungs)]
    levels = [p50(rung.measurement.total_ms) or 0.0 for rung in result.rungs]
    title, rule = "Who saves what: end to end, step by step", _rule(steps, result.rungs[0].measurement.repeats)
    return _falling(title, titles(result.rungs), levels, steps, _explained(result, steps), rule, log)


def training_waterfall(found: TrainLadder) -> go.Figure:
    """What each technique takes away of a step of training, from none to all. The steps add up."""
    changes = [rung.found.change for rung in found.rungs if rung.found.change is not None]
    levels = [*(change.before for change in changes[:1]), *(change.after for change in changes)]
    steps = [OwnTime.of_pairs(each, was, now - was) for each, (was, now) in zip(changes, pairwise(levels), strict=True)]
    names = ["no technique", *(rung.title for rung in found.rungs)]
    return _falling("Who saves what of a step", names, levels, steps, [], _rule(steps, len(found.whole.baseline.steps)))


def _falling(
    title: str, names: Sequence[str], levels: Sequence[float], steps: Sequence[OwnTime],
    remarks: Sequence[tuple[int, str]], rule: str, log: bool | None = None,
) -> go.Figure:  # fmt: skip
    """Bars from the first level to the last, with what each step is above it, remarks, and the rule of the whiskers."""
    names = [*names, "all of it"]
    log = theme.is_far(levels) if log is None else log
    floor = _floor(levels) if log else 0.0
    ends = [(floor, levels[0]), *pairwise(levels), (floor, levels[-1])]
    tips = [ms_words(levels[0]), *(_tip(step, *pair) for step, pair in zip(steps, ends[1:], strict=False))]
    places = list(range(len(names)))
    fig = theme.figure(title, height=420, bargap=0.28)
    fig.add_bar(
        x=places, base=rounded(map(min, ends)), y=rounded(abs(a - b) for a, b in ends),
        marker=_painted([theme.BASELINE, *(step.color for step in steps), theme.SELECTION]),
        customdata=[*tips, ms_words(levels[-1])],
        text=[theme.words(name) for name in names], textposition="none",
        hovertemplate="<b>%{text}</b>: %{customdata}<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(x=places[1:-1], y=rounded(levels[1:]), **_whiskers(steps, levels[1:], "y", floor))
    highs = [levels[0], *(step.high_level for step in steps), levels[-1]]
    tops = [max(*pair, high) for pair, high in zip(ends, highs, strict=True)]
    labels = [f"<b>{brief(levels[0])}</b>", *map(_label, steps), f"<b>{brief(levels[-1])}</b>"]
    beneath = min((at for at, _ in remarks), default=len(places))
    told_above = sum(remark.count("<br>") + 1 for _, remark in remarks)
    lines = [label.count("<br>") + 1 + (told_above if at >= beneath else 0) for at, label in enumerate(labels)]
    end = _top(tops, lines, floor, log)
    fig.update_yaxes(theme.axis(floor, end, "ms", log))
    tops = [top * (end / floor) ** GAP if log else top + end * GAP for top in tops]  # clear of the whiskers
    fig.add_scatter(
        x=places, y=rounded(tops), mode="text", text=labels, textposition="top center", textfont={"size": 11},
        cliponaxis=False, hoverinfo="skip",
    )  # fmt: skip
    told_above = 0
    for at, remark in remarks:
        _remark(fig, at, len(names), remark, told_above)
        told_above += remark.count("<br>") + 1
    fig.update_xaxes(
        showgrid=False, tickvals=places, ticktext=[theme.words(name, NAME_WIDTH) for name in names],
        tickfont={"size": 11}, range=[-0.6, len(names) - 0.4],
    )  # fmt: skip
    below = {"text": rule, "font": {"size": 11}, "standoff": 4}
    return fig.update_layout(showlegend=False, xaxis_title=below)


def left_out(result: Ladder, log: bool | None = None) -> go.Figure:
    """What the full recipe takes without each technique: these do not add up, since techniques help each other.

    Bars run from the full recipe's time to the time without one, `log` as for `waterfall`.
    """
    full = result.rungs[-1].measurement
    rungs = [rung for rung in result.left_out if rung.delta_ms is not None]
    steps, level = [OwnTime.of(rung, full) for rung in rungs], p50(full.total_ms) or 0.0
    without = [p50(rung.measurement.total_ms) or 0.0 for rung in rungs]
    log = theme.is_far([level, *without]) if log is None else log
    fig = theme.figure("The full recipe without one of them", height=106 + 30 * len(rungs), bargap=0.3)
    names = [f"without {theme.words(name)}" for name in titles(rungs)]
    tips = [_tip(step, level, end) for step, end in zip(steps, without, strict=True)]
    fig.add_bar(
        y=names, base=rounded(min(level, end) for end in without), x=rounded(abs(end - level) for end in without),
        orientation="h", marker=_painted([step.opposite for step in steps]), customdata=tips,
        hovertemplate="<b>%{y}</b>: %{customdata}<extra></extra>",
    )  # fmt: skip
    fig.add_scatter(x=rounded(without), y=names, **_whiskers(steps, without, "x", 0.0))
    ends = [max(level, end, step.high_level) for end, step in zip(without, steps, strict=True)]
    fig.add_scatter(
        x=rounded(ends), y=names, mode="text", text=[f"  {_line(step)}" for step in steps],
        textposition="middle right", textfont={"size": 11}, cliponaxis=False, hoverinfo="skip",
    )  # fmt: skip
    fig.add_vline(x=level, line={"color": theme.INK, "width": 1})
    low = min(level, *without, *(step.low_level for step in steps)) if steps else level
    rule = f'<br><span style="font-size:11px">{_rule(steps, full.repeats)}</span>' if steps else ""
    title = f"ms, end to end; the line is the full recipe ({brief(level)}){rule}"
    fig.update_xaxes(theme.axis(0.9 * low if log else 0.0, max([level, *ends]), title, log, room=1.3))
    fig.update_yaxes(autorange="reversed", showgrid=False, tickfont={"size": 11})
    return fig.update_layout(showlegend=False)


def titles(rungs: Sequence[Rung]) -> list[str]:
    """The rungs' names."""
    return [rung.title if i or rung.technique else "baseline" for i, rung in enumerate(rungs)]


def _label(step: OwnTime) -> str:
    """The difference in ms, or that there is none to tell; broken as wide as a column."""
    if step.verdict == "cannot tell apart":
        return f"cannot<br>tell apart<br>({signed(step.ms, 3)})"
    return f"<b>{signed(step.ms, 3)}</b>"


def _line(step: OwnTime) -> str:
    """The same in one line."""
    return _label(step).replace("<br>", " ") + (" ms" if step.verdict != "cannot tell apart" else "")


def _tip(step: OwnTime, before: float, after: float) -> str:
    return f"{brief(before)} → {ms_words(after)}<br>{theme.words(step.words)}"


def _painted(colors: Sequence[str]) -> dict[str, Any]:
    """A bar of no height is a line still."""
    return {"color": colors, "line": {"color": colors, "width": 2}}


def _whiskers(steps: Sequence[OwnTime], ends: Sequence[float], along: str, floor: float) -> dict[str, Any]:
    """Marks of no size where each step leads, with the interval of that."""
    far = {"type": "data", "symmetric": False, "color": theme.INK, "thickness": 1.3, "width": 4}
    far["array"] = rounded(max(step.high_level - end, 0) for step, end in zip(steps, ends, strict=True))
    far["arrayminus"] = rounded(max(end - max(step.low_level, floor), 0) for step, end in zip(steps, ends, strict=True))
    return {"mode": "markers", "marker": {"size": 1, "color": theme.INK}, "hoverinfo": "skip", f"error_{along}": far}


def _top(tops: Sequence[float], lines: Sequence[int], floor: float, log: bool) -> float:
    """Where the axis ends, so that each bar has its lines of text above it at the least height of a figure."""
    shares = [1 - LINE_SHARE * count - 2 * GAP for count in lines]
    if not log:
        return max(top / share for top, share in zip(tops, shares, strict=True))
    return floor * max((top / floor) ** (1 / share) for top, share in zip(tops, shares, strict=True))


def _explained(result: Ladder, steps: Sequence[OwnTime]) -> list[tuple[int, str]]:
    """Why a red bar is red, as far as what Python launches for a token tells, and whether it pays in the end."""
    found = []
    for at, ((before, rung), step) in enumerate(zip(pairwise(result.rungs), steps, strict=True), 1):
        if step.verdict != "worse":
            continue
        old, new = (_launches(each) for each in (before, rung))
        why = f"{plain(new)} launches per token, up from {plain(old)}" if old and new and new > old else ""
        without = next((each for each in result.left_out if each.technique == rung.technique), None)
        if without is not None:
            why += f"{'; ' if why else ''}{_in_the_end(OwnTime.of(without, result.rungs[-1].measurement))}"
        if why:
            found.append((at, theme.words(f"▾ {rung.title} slower here: {why}", REMARK_WIDTH)))
    return found


def _in_the_end(step: OwnTime) -> str:
    """What it is to the full recipe to be without a technique that was slower on its rung."""
    if step.verdict == "cannot tell apart":
        return "in the full recipe it makes no measurable difference"
    without = f"the full recipe is {ms_words(abs(step.ms))}"
    return f"{without} {'slower without it, so there it pays' if step.verdict == 'worse' else 'faster without it'}"


def _remark(fig: go.Figure, at: int, count: int, text: str, line: int) -> None:
    """At the top of the plot, on the side of its bar that has the room."""
    early = at < 0.6 * count
    fig.add_annotation(
        text=text, x=at - 0.36 if early else at + 0.36, xanchor="left" if early else "right", y=1, yref="paper",
        yanchor="top", yshift=-LINE_PX * line, showarrow=False, font={"size": 11}, align="left",
    )  # fmt: skip


def _rule(steps: Sequence[OwnTime], num_repeats: int) -> str:
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
            f"whiskers: range of all {fewest} pairs; grey: cannot tell apart, since the range holds 0 or is wider than "
            "its distance from 0"
        )
    return "whiskers: interval of the paired differences; grey: cannot tell apart"


def _launches(rung: Rung) -> float | None:
    cost = rung.measurement.cost
    return cost.launches_per_token if cost else None


def _floor(levels: Sequence[float]) -> float:
    """Where bars begin on a logarithmic axis: the shortest has a tenth of the height."""
    low, high = min(levels), max(levels)
    return float(f"{low / max((high / low) ** 0.12, 1.3):.3g}")
