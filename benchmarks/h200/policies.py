"""Batching policies on the GPU, without HTTP: the highest load that each serves in time, and simulations beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from typing import Any

from eet_lab.engine.encode import EncoderEngine
from eet_lab.models import Model
from eet_lab.scheduling.agreement import agreement
from eet_lab.scheduling.choices import capacity, fitting_policies
from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.policy import BasePolicy
from eet_lab.scheduling.served import Latencies
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.traffic import Drawn, Gamma, Lengths, Traffic, Uniform, make_traffic
from eet_lab.serving.live import serve_traffic, served_recipe
from eet_lab.serving.profile import profile
from eet_lab.serving.warm_up import warm_up_encoder
from h200.session import Session

P99_MS = 50.0
"""The latest that 99 of 100 texts may be read."""
SPAN_S = 0.8
"""How long texts come, at a load that is tried."""
FEWEST, MOST, SMOKED = 300, 40_000, 30
MOST_SIMULATED = 2_000
"""Texts of a simulation, which takes the host longer than a GPU takes to read them."""
SIMULATIONS, TRIES = 6, 6
COUNTED = 3
"""Runs of a load, of which the one in the middle counts: a host that is busy elsewhere disturbs one."""
NAMES = ("naive_padding", "length_buckets", "dynamic_program", "token_budget")
"""The padded ones first: they share an engine, whose captured passes they share, too."""
LENGTHS = {"U[5,500]": Uniform(5, 500), "U[2,100]": Uniform(2, 100)}
SMALL = {"U[1,20]": Uniform(1, 20), "U[2,9]": Uniform(2, 9)}
AXES = (0, 1, 64, 256, 512, 1024, 2047), (1, 4, 16, 64), (16, 320, 1300)
"""What is measured of a decoder: tokens beyond one a row, rows, and columns that a row sees."""
PROMPTS = Uniform(100, 1024)
LONGEST = 8_000
DOCUMENTS = Drawn((*range(20, 301),) * 17 + (LONGEST,) * 24, f"U[20,300], one of 200 of {LONGEST:,}")
"""Prompts of a chat, among which is now and then a document: whoever comes while it is read waits for all of it."""
DOCUMENT_AXES = (0, 1, 64, 256, 512, 1024, 2048, 4096, 8191), (1, 4, 16, 64), (16, 320, 1300, 8300)
LOWEST, HIGHEST = 0.3, 2.7
"""The shares of what is simulated between which a load is searched for: it is the lowest where none was in time."""
LOAD = 0.7
"""The share of the capacity at which a simulation is held against what is measured."""


def highest_loads(name: str) -> Callable[[Session], Any]:
    """For each policy of an encoder: the most requests a second of which 99 % are read within `P99_MS`.

    A search by simulation says where to look; what is measured there, and around it, counts.
    """

    def work(session: Session) -> Any:
        model = session.model("smoke-encoder" if session.smoke else name)
        table, found = profile(model, progress=None, cancel=session.deadline), dict[str, Any]()
        for words, lengths in (SMALL if session.smoke else LENGTHS).items():
            found[words] = {}
            with ExitStack() as opened:
                engines = dict[str, EncoderEngine]()
                for policy in NAMES:
                    begin = time.perf_counter()
                    told = _highest(session, model, table, lengths, policy, engines, opened)
                    found[words][policy] = told | {"seconds": round(time.perf_counter() - begin, 1)}
                    print(words, policy, json.dumps(found[words][policy]), flush=True)
                    write_found(session, f"policies-{name}", {"source": asdict(table.source), "found": found})
        return found

    return work


def simulated_beside_measured(
    name: str,
    recipe: str,
    chunks: tuple[int, ...],
    *,
    lengths: Lengths = PROMPTS,
    axes: tuple[tuple[int, ...], ...] = AXES,
    requests: int = 400,
    file: str | None = None,
) -> Callable[[Session], Any]:
    """One trace of a decoder at 70 % load for each size of chunk: times of a simulation, and those of the GPU."""

    def work(session: Session) -> Any:
        model = session.model("smoke" if session.smoke else name)
        words, measured_axes, prompts, answers, num = recipe, axes, lengths, Uniform(50, 200), requests
        if session.smoke:
            words, measured_axes = "all,continuous_batching:rows=2:budget=8:chunk=8", ((0, 1, 7), (1, 2), (4, 10))
            prompts, answers, num = Uniform(3, 6), Uniform(2, 4), 20
        table = profile(model, words, axes=measured_axes, cancel=session.deadline)
        rows, budget = table.most_rows, table.most_tokens
        joining = [f"continuous_batching:max_rows={rows}:budget={budget}:chunk={min(c, budget)}" for c in chunks]
        rate = LOAD * capacity(joining[0], prompts, answers, table)
        traffic = make_traffic(num, Gamma(rate), prompts, answers, seed=1)
        found = dict[str, Any]()
        told = {"rate": rate, "requests": num, "lengths": str(prompts), "answers": str(answers)}
        for one in joining:
            [policy] = fitting_policies([one], traffic, table)
            simulated = simulate_traffic(traffic, policy, table)
            measured = serve_traffic(model, traffic, policy, table, cancel=session.deadline)
            both = {each.name: each._asdict() | {"error": each.error} for each in agreement(simulated, measured)}
            found[one] = {"agreement": both, "measured": measured.percentiles}
            print(one, json.dumps(found[one]), flush=True)
        write_found(session, f"simulated-{file or name}", {"source": asdict(table.source), **told, "found": found})
        return found

    return work


def write_found(session: Session, name: str, found: dict[str, Any]) -> None:
    """Write what was found, with what it was found on, as a file for benchmarks/."""
    (session.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def _highest(
    session: Session,
    model: Model,
    table: CostTable,
    lengths: Lengths,
    name: str,
    engines: dict[str, EncoderEngine],
    opened: ExitStack,
) -> dict[str, Any]:
    """By bisection, first in simulation and then measured around what that says.

    An engine of each recipe stays open, so that what it captures is captured once.
    """
    most, fewest = capacity(name, lengths, Uniform(1, 1), table), SMOKED if session.smoke else FEWEST

    def simulated(rate: float) -> Latencies:
        traffic, policy = _traffic(rate, lengths, name, table, fewest, MOST_SIMULATED)
        return simulate_traffic(traffic, policy, table)

    def measured(rate: float) -> Latencies:
        traffic, policy = _traffic(rate, lengths, name, table, fewest, MOST)
        counted = 1 if session.smoke else COUNTED
        runs = [
            serve_traffic(model, traffic, policy, table, engine=engine, cancel=session.deadline)
            for _ in range(1 + counted)
        ]
        # Without the first: a server that has run for a while has captured its passes.
        return sorted(runs[1:], key=lambda served: served.percentiles["e2e_ms"]["p99"])[counted // 2]

    expected, _ = _bisected(simulated, most / 100, most * 1.1, 3 if session.smoke else SIMULATIONS)
    traffic, policy = _traffic(expected, lengths, name, table, fewest, MOST)
    recipe = served_recipe(model, table, policy)
    engine = engines.get(str(recipe))
    if engine is None:
        engine = engines[str(recipe)] = opened.enter_context(closing(EncoderEngine(model.encoder, recipe.parts)))
    begin, before = time.perf_counter(), engine.captures  # of policies that had this engine earlier
    warm_up_encoder(model, engine, traffic, policy, table, session.deadline)
    warm = {"warm_up_s": round(time.perf_counter() - begin, 1), "captures": engine.captures - before}
    reached, at = _bisected(measured, expected * LOWEST, expected * HIGHEST, 2 if session.smoke else TRIES)
    return {"simulated_per_s": expected, "measured_per_s": reached, "at": at} | warm


def _bisected(
    serve: Callable[[float], Latencies], low: float, high: float, tries: int
) -> tuple[float, dict[str, Any] | None]:
    """The highest rate that was in time, and what was seen there; `low` and None where none was."""
    seen = None
    for _ in range(tries):
        rate = (low + high) / 2
        served = serve(rate)
        if served.percentiles["e2e_ms"]["p99"] <= P99_MS:
            low, seen = rate, served.percentiles["e2e_ms"] | {"per_s": served.requests_per_s}
        else:
            high = rate
    return low, seen


def _traffic(
    rate: float, lengths: Lengths, name: str, table: CostTable, fewest: int, most: int
) -> tuple[Traffic, BasePolicy]:
    num = max(fewest, min(most, round(rate * SPAN_S)))
    traffic = make_traffic(num, Gamma(rate), lengths, Uniform(1, 1), seed=1)
    [policy] = fitting_policies([name], traffic, table)
    return traffic, policy
