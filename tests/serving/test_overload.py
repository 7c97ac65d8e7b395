"""More requests than can be answered: each is answered or refused with a reason, and nothing is left of it."""

from __future__ import annotations

import psutil
import pytest
from families import ours

import eet_lab
from eet_lab.scheduling.traffic import Gamma, Traffic, Uniform, make_traffic
from eet_lab.serving.load import Loaded, Target, run_load
from eet_lab.words import MiB

from .conftest import eventually

LENGTHS, ANSWERS = Uniform(2, 20), Uniform(1, 4)
FULL = "429 too_many_queued_requests"


@pytest.mark.slow
def test_1000_requests_at_one_and_a_half_times_the_capacity():
    model = ours("llama")
    served = eet_lab.serve(
        model, "all,continuous_batching:rows=8", front="thread", max_queued_requests=16, max_model_len=64
    )
    target, process = Target(served.wait_until_up(60).url, vocab_size=model.config.vocab_size), psutil.Process()
    try:
        at_once = make_traffic(16, Gamma(1e9), LENGTHS, ANSWERS)
        capacity = max(run_load(target, at_once).requests_per_s for _ in range(5))
        runs = [overloaded(target, 1.5 * capacity)]
        before = process.memory_info().rss
        runs.append(overloaded(target, 1.5 * capacity))
        grown = process.memory_info().rss - before
        service = served._server.service
        eventually(lambda: service.admission.num_inside == 0)
        assert service.admission.num_queued == service.admission.queued_tokens == 0
        assert service.generator is not None and not service.generator._jobs
    finally:
        served.stop()
    for traffic, found in runs:
        assert found.counts["answered"] + found.counts["refused"] == 500, found.reasons
        assert found.counts["answered"] > 100 and list(found.reasons) == [FULL]
        is_told = found.told == traffic.new_tokens
        assert all(told for told, outcome in zip(is_told, found.outcome, strict=True) if outcome == "answered")
    assert grown < 16 * MiB


def overloaded(target: Target, rate: float) -> tuple[Traffic, Loaded]:
    """500 requests that were more than the server could answer, and what became of them.

    What else runs on the machine while the capacity is measured makes it look small: then they come twice as fast.
    """
    for factor in (1, 2, 4, 8):
        traffic = make_traffic(500, Gamma(factor * rate), LENGTHS, ANSWERS)
        found = run_load(target, traffic, apart=True)
        if found.counts["refused"]:
            return traffic, found
    raise AssertionError(f"at {8 * rate:,.0f} requests a second none was refused: {found.counts}")
