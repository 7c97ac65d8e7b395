"""Prefix caching, without a model: pages are found by their tokens, shared, counted and evicted, and not written."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_device import CONTEXT, VOCAB, Server, serve
from test_scheduling import planned
from test_scheduling_lives import policies

from eet_lab.scheduling import Request, Schedule, Scheduler, SharedPageLedger

PAGE = 4


def scheduler_of(num_pages: int = 16, page: int = PAGE, **policy) -> Scheduler:
    made = Schedule(**{"max_rows": 4, "joins": True} | policy)
    return Scheduler(made, SharedPageLedger(1 + num_pages, page, made.max_rows), CONTEXT)


def added(scheduler: Scheduler, *prompts, new: int = 1) -> list[Request]:
    requests = [Request(tuple(prompt), new) for prompt in prompts]
    for request in requests:
        scheduler.add(request)
    return requests


def ended(scheduler: Scheduler, *prompts, new: int = 1) -> list[Request]:
    """Serve these prompts one after the other; the host knows all but the last token that each was told."""
    requests = added(scheduler, *prompts, new=new)
    while not scheduler.idle:
        rows = scheduler.next()
        scheduler.advance(rows)
        for row in rows:
            if row.tells:
                row.request.generated.append(50 + len(row.request.generated))
    return requests


def alike(draw: random.Random, number: int, most: int) -> list[Request]:
    """Requests that need up to `most` columns; prompts are beginnings of a few texts, with an end of their own."""
    texts = [draw.choices(range(VOCAB), k=most) for _ in range(draw.randint(1, 3))]
    made = []
    for _ in range(number):
        columns = draw.randint(1, most)
        length = draw.choice((1, columns, draw.randint(1, columns)))
        own = draw.choice((0, 0, draw.randint(0, length)))
        prompt = draw.choice(texts)[: length - own] + draw.choices(range(VOCAB), k=own)
        made.append(Request(tuple(prompt), columns + 1 - length))
    return made


@given(policies, st.integers(1, 8), st.integers(1, 14), st.integers(0, 2**32), st.sampled_from([0.0, 0.1]))
@settings(max_examples=300)
def test_all_are_served_as_if_they_were_alone(policy, page, num_pages, seed, cancels):
    draw = random.Random(seed)
    scheduler = Scheduler(policy, SharedPageLedger(1 + num_pages, page, policy.max_rows), CONTEXT)
    serve(Server(scheduler, draw, cancels), alike(draw, draw.randint(1, 12), min(num_pages * page, CONTEXT - 1)))


def test_a_soak_leaves_every_page_free_or_cached():
    draw = random.Random(0)
    ledger = SharedPageLedger(1 + 30, 4, 16)
    scheduler = Scheduler(Schedule(chunk=16, budget=40, max_rows=16, joins=True), ledger, CONTEXT)
    server = Server(scheduler, draw, cancels=0.1)
    for request in alike(draw, 2000, 63):
        server.add(request)
        while len(scheduler.waiting) > 12:
            server.step()
    server.end()
    assert len(server.cancelled) > 100 and len(server.stopped) > 100 and len(server.finished) > 100
    assert scheduler.num_preempted > 50
    assert ledger.free == 30 and ledger._idle and ledger.num_shared == 0
    assert 0.3 < ledger.num_hits / ledger.num_queries < 1
    ledger.reset()
    assert ledger.free == 30 and not ledger._idle and not ledger._by_key and not ledger._by_page


def test_the_second_of_two_prompts_begins_behind_what_they_share():
    scheduler = scheduler_of()
    stem = list(range(10))
    first, second = ended(scheduler, [*stem, 20, 21, 22], [*stem, 30, 31, 32])
    assert (first.cached, second.cached) == (0, 8), "the third page holds tokens of one alone"
    assert (scheduler.ledger.num_queries, scheduler.ledger.num_hits) == (26, 8)


def test_the_same_tokens_behind_others_are_not_the_same():
    scheduler = scheduler_of()
    *_, third = ended(scheduler, [1] * 4 + [9] * 4 + [5], [2] * 4 + [9] * 4 + [5], [2] * 4 + [9] * 4 + [6])
    assert third.cached == 8
    assert ended(scheduler, [3] * 4 + [9] * 4 + [5])[0].cached == 0


def test_a_hash_that_collides_serves_nobody_else():
    class Token(int):
        """All have one hash."""

        __hash__ = lambda self: 7  # noqa: E731

    scheduler = scheduler_of()
    one, another, again = ended(scheduler, *([Token(each)] * 9 for each in (1, 2, 1)))
    assert len({hash(key) for key in scheduler.ledger._by_key}) < len(scheduler.ledger._by_key)
    assert (one.cached, another.cached, again.cached) == (0, 0, 8)


def test_two_that_come_together_read_what_they_share_once():
    scheduler = scheduler_of(chunk=8)
    first, second, third = added(scheduler, [1] * 12 + [2], [1] * 12 + [3], [4, 5])
    assert planned(scheduler, 3) == [
        [(0, 0, 8, False)],  # the second waits for it, and the third behind the second: in the order of arrival
        [(0, 8, 5, True)],
        [(0, 12, 1, True), (1, 0, 2, True)],
    ]
    assert [each.cached for each in (first, second, third)] == [0, 12, 0]


def test_groups_that_begin_together_wait_for_nobody():
    scheduler = scheduler_of(joins=False)
    first, second = added(scheduler, [1] * 9, [1] * 9)
    assert planned(scheduler, 1) == [[(0, 0, 9, True), (1, 0, 9, True)]]
    (third,) = ended(scheduler, [1] * 9)
    assert (first.cached, second.cached, third.cached) == (0, 0, 8)


def test_pages_are_shared_by_those_that_run_and_stay_until_the_last_has_left():
    scheduler = scheduler_of()
    ledger = scheduler.ledger
    first, second = added(scheduler, [1] * 9, [1] * 8 + [2], new=5)
    planned(scheduler, 2)
    assert ledger.table[0][:2] == ledger.table[1][:2] and ledger.table[0][2] != ledger.table[1][2]
    assert ledger.num_shared == 2 and ledger.free == 16 - 4
    scheduler.cancel(first)
    assert ledger.num_shared == 0 and ledger.free == 16 - 3 and not ledger._idle
    scheduler.cancel(second)
    assert ledger.free == 16 and len(ledger._idle) == 2


def test_a_prompt_that_is_there_as_a_whole_reads_one_token_in_a_copy():
    scheduler = scheduler_of()
    ended(scheduler, [1, 2, 3, 4, 5, 6, 7, 8])
    ledger = scheduler.ledger
    assert ledger.take_copies() == []
    (again,) = added(scheduler, [1, 2, 3, 4, 5, 6, 7, 8])
    assert [row[1:] for row in scheduler.next()] == [(0, 7, 1, True)]
    [(source, target)] = ledger.take_copies()
    assert ledger.table[0] == [ledger._by_key[0, (1, 2, 3, 4)].page, target]
    assert source != target and ledger._users[source] == 0, "the page itself stays cached, and is written to by nobody"
    assert again.cached == 7


def test_a_copy_is_made_in_place_where_no_page_is_free():
    scheduler = scheduler_of(num_pages=2)
    ended(scheduler, [1, 2, 3, 4, 5, 6, 7, 8])
    (again,) = added(scheduler, [1, 2, 3, 4, 5, 6, 7, 8])
    scheduler.next()
    [(source, target)] = scheduler.ledger.take_copies()
    assert source == target == scheduler.ledger.table[0][1]
    assert again.cached == 7 and scheduler.ledger.free == 0


def test_the_least_recently_used_page_is_evicted_and_the_last_of_a_request_before_its_first():
    scheduler = scheduler_of(num_pages=5)
    ledger = scheduler.ledger
    ended(scheduler, [1] * 4 + [2] * 4, [3] * 8)
    assert len(ledger._idle) == 4 and len(ledger._free) == 1
    ended(scheduler, [1] * 4 + [9])  # uses the first page of the first one again
    assert [ledger._by_page[page].key[1] for page in ledger._idle] == [(2,) * 4, (3,) * 4, (3,) * 4, (1,) * 4]
    ended(scheduler, [5] * 12)
    assert [ledger._by_page[page].key[1][0] for page in ledger._idle] == [3, 1, 5, 5, 5]
    assert ended(scheduler, [3] * 8 + [1])[0].cached == 4, "its second page went before its first"


def test_a_page_that_is_copied_was_used_last():
    scheduler = scheduler_of(num_pages=6)
    ended(scheduler, [1] * 4, [2] * 4, [1] * 4)
    assert [scheduler.ledger._by_page[page].key[1][0] for page in scheduler.ledger._idle] == [2, 1]


def test_what_follows_a_page_that_was_evicted_is_found_behind_another_of_the_same_tokens():
    scheduler = scheduler_of(num_pages=6, joins=False)
    _, longer = added(scheduler, [1] * 8)[0], added(scheduler, [1] * 8 + [2] * 4, new=12)[0]
    while not scheduler.idle:  # both read the same 8 tokens; the pages of the first are evicted as the other one grows
        scheduler.advance(scheduler.next())
    ledger = scheduler.ledger
    assert len(ledger._idle) == 3 == len(ledger._by_key) == len(ledger._by_page) and longer.status == "finished"
    assert ended(scheduler, [1] * 8 + [2] * 4 + [3])[0].cached == 12


def test_answers_are_cached_as_far_as_the_host_knows_them():
    scheduler = scheduler_of()
    (first,) = ended(scheduler, [1, 2, 3], new=9)
    assert first.generated[:5] == [50, 51, 52, 53, 54]
    (then,) = ended(scheduler, [1, 2, 3, *first.generated, 7, 7])
    assert then.cached == 8, "a conversation that goes on"
    for known in (5, 1):
        scheduler = scheduler_of()
        (late,) = added(scheduler, [1, 2, 3], new=9)
        planned(scheduler, 8)
        late.generated = [50, 51, 52, 53, 54][:known]
        scheduler.cancel(late)
        assert len(scheduler.ledger._idle) == (3 + known) // PAGE


def test_what_was_not_read_is_not_found():
    scheduler = scheduler_of(chunk=5)
    (first,) = added(scheduler, [1] * 12)
    planned(scheduler, 1)
    scheduler.cancel(first)
    assert len(scheduler.ledger._idle) == 1 and len(scheduler.ledger._by_key) == 1
    assert ended(scheduler, [1] * 12)[0].cached == 4


def test_one_that_gave_way_finds_its_own_pages():
    scheduler = scheduler_of(num_pages=6, max_rows=2)
    old, new = added(scheduler, [1] * 7, [2] * 8, new=12)
    while not scheduler.num_preempted:
        for row in (rows := scheduler.next()):
            if row.tells:
                row.request.generated.append(9)
        scheduler.advance(rows)
    assert new.read == 0 and new.status == "waiting" and scheduler.ledger._idle
    scheduler.cancel(old)
    assert [row.start for row in scheduler.next()] == [new.cached] and new.cached >= 8


def test_it_needs_no_more_pages_than_without():
    """A prompt that fills them all is served, whatever they hold, and whoever comes after."""
    scheduler = scheduler_of(num_pages=3, max_rows=2)
    for prompt in ([1] * 12, [1] * 12, [2] * 12, [1] * 11, [2] * 12):
        (request,) = ended(scheduler, prompt)
        assert request.status == "finished"


@pytest.mark.parametrize("page", [1, 2, 16])
def test_any_size_of_page(page):
    scheduler = scheduler_of(page=page, num_pages=64)
    ended(scheduler, [*range(33)])
    assert ended(scheduler, [*range(33)])[0].cached == 32
