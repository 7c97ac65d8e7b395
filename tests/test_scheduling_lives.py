"""Whole lives of requests, on a device that is played: each gets the tokens that it would get alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_device import CONTEXT, Server, requests, scheduler_of, serve

from eet_lab.scheduling import PageLedger, Schedule, Scheduler, Slab

limits = st.none() | st.integers(1, 24)
policies = st.integers(1, 6).flatmap(
    lambda rows: st.builds(
        Schedule,
        chunk=limits,
        budget=st.none() | st.integers(rows, 24),
        max_rows=st.just(rows),
        joins=st.booleans(),
    )
)


@given(policies, st.integers(1, 8), st.integers(1, 12), st.integers(0, 2**32), st.sampled_from([0.0, 0.1]))
@settings(max_examples=400)
def test_all_are_served_as_if_they_were_alone_from_pages(policy, page, num_pages, seed, cancels):
    draw = random.Random(seed)
    scheduler = Scheduler(policy, PageLedger(1 + num_pages, page, policy.max_rows), CONTEXT)
    serve(Server(scheduler, draw, cancels), requests(draw, draw.randint(1, 12), min(num_pages * page, CONTEXT - 1)))


@given(policies, st.integers(1, 40), st.integers(0, 2**32), st.sampled_from([0.0, 0.1]))
def test_all_are_served_as_if_they_were_alone_from_a_slab(policy, columns, seed, cancels):
    draw = random.Random(seed)
    server = Server(Scheduler(policy, Slab(policy.max_rows, columns), CONTEXT), draw, cancels)
    serve(server, requests(draw, draw.randint(1, 12), columns))
    assert server.scheduler.num_preempted == 0


@pytest.mark.parametrize("ledger", [PageLedger(1 + 30, 4, 16), Slab(16, 63)], ids=["pages", "slab"])
def test_a_soak_of_requests_that_join_and_leave(ledger):
    draw = random.Random(0)
    scheduler = Scheduler(Schedule(chunk=16, budget=40, max_rows=16, joins=True), ledger, CONTEXT)
    server = Server(scheduler, draw, cancels=0.1)
    for request in requests(draw, 2000, 63):
        server.add(request)
        while len(scheduler.waiting) > 12:
            server.step()
    server.end()
    assert len(server.cancelled) > 100 and len(server.stopped) > 100 and len(server.finished) > 100
    assert (scheduler.num_preempted > 100) == isinstance(ledger, PageLedger)


def test_a_token_for_each_slot_still_serves_everybody():
    server = Server(scheduler_of(chunk=1, budget=4), random.Random(0))
    serve(server, requests(random.Random(1), 9, 9))
