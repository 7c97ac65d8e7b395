"""The scheduler against its promises, one at a time."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest
from played_device import Server, scheduler_of

from eet_lab.errors import PromptError, ScheduleError
from eet_lab.scheduling import PageLedger, Request, Schedule, Scheduler, Slab


def planned(scheduler: Scheduler, passes: int) -> list[list[tuple[int, int, int, bool]]]:
    """(slot, start, count, tells) of the rows of so many passes."""
    plans = []
    for _ in range(passes):
        rows = scheduler.next()
        plans.append([row[1:] for row in rows])
        scheduler.advance(rows)
    return plans


def made(scheduler: Scheduler, *sizes: tuple[int, int]) -> list[Request]:
    added = [Request((7,) * length, new) for length, new in sizes]
    for request in added:
        scheduler.add(request)
    return added


def test_a_prompt_is_read_in_chunks_beside_rows_that_decode():
    scheduler = scheduler_of(chunk=3, budget=4)
    made(scheduler, (2, 9))
    assert planned(scheduler, 1) == [[(0, 0, 2, True)]]
    made(scheduler, (7, 2), (2, 2))
    assert planned(scheduler, 5) == [
        [(0, 2, 1, True), (1, 0, 3, False)],
        [(0, 3, 1, True), (1, 3, 3, False)],
        [(0, 4, 1, True), (1, 6, 1, True), (2, 0, 2, True)],  # what the older prompt leaves goes to the newer one
        [(0, 5, 1, True), (1, 7, 1, True), (2, 2, 1, True)],
        [(0, 6, 1, True)],
    ]


def test_token_by_token_and_all_at_once_are_values_of_the_policy():
    by_token, at_once = scheduler_of(chunk=1), scheduler_of()
    for scheduler in (by_token, at_once):
        made(scheduler, (3, 2), (2, 2))
    assert planned(by_token, 2) == [[(0, 0, 1, False), (1, 0, 1, False)], [(1, 1, 1, True), (0, 1, 1, False)]]
    assert planned(at_once, 1) == [[(0, 0, 3, True), (1, 0, 2, True)]]


def test_without_joining_a_group_starts_when_none_runs():
    scheduler = scheduler_of(joins=False, max_rows=2)
    first, second, third = made(scheduler, (1, 3), (1, 1), (1, 1))
    scheduler.advance(scheduler.next())
    assert (second.status, third.status) == ("finished", "waiting")  # a free slot, but none may join
    planned(scheduler, 2)
    assert first.status == "finished"
    assert [row.request for row in scheduler.next()] == [third]


def test_low_slots_are_given_out_first():
    scheduler = scheduler_of()
    one, two, three = made(scheduler, (1, 9), (1, 9), (1, 9))
    scheduler.next()
    scheduler.cancel(three)
    scheduler.cancel(one)
    (four,) = made(scheduler, (1, 9))
    scheduler.next()
    assert (two.slot, four.slot) == (1, 0)


def test_the_newest_gives_way_and_waits_until_its_values_are_on_the_host():
    pages = PageLedger(1 + 4, 2, 4)
    scheduler = scheduler_of(pages)
    old, new = made(scheduler, (3, 6), (2, 4))
    planned(scheduler, 1)
    assert (old.length, new.length, pages.free) == (4, 3, 1)
    planned(scheduler, 1)
    assert (len(pages.table[0]), len(pages.table[1]), pages.free) == (2, 2, 0)
    rows = scheduler.next()  # the old one comes to a third page
    assert [row.request for row in rows] == [old]
    assert (new.status, new.read, new.length, new.slot) == ("waiting", 0, 4, None)
    assert scheduler.num_preempted == 1 and list(scheduler.waiting) == [new]
    (third,) = made(scheduler, (2, 1))
    scheduler.advance(rows)
    for _ in range(3):
        rows = scheduler.next()
        assert [row.request for row in rows] == [old]
        scheduler.advance(rows)
    assert old.status == "finished" and pages.free == 4
    new.generated = [1]
    assert scheduler.next() == []  # one of its two new tokens is on the device alone, and nobody overtakes it
    assert not scheduler.idle and third.status == "waiting"
    new.generated.append(2)
    assert [row[:1] + row[2:] for row in scheduler.next()] == [(new, 0, 4, True), (third, 0, 2, True)]


def test_a_page_for_each_that_runs_remains_when_one_joins():
    pages = PageLedger(1 + 5, 4, 4)
    scheduler = scheduler_of(pages)
    made(scheduler, (4, 5), (4, 4), (9, 2))
    scheduler.next()
    assert len(scheduler.running) == 2 and pages.free == 3  # enough for the third alone, not for those that grow
    assert scheduler.num_preempted == 0


def test_a_stop_token_may_come_when_the_request_waits_or_has_left():
    pages = PageLedger(1 + 4, 2, 4)
    scheduler = scheduler_of(pages)
    old, new = made(scheduler, (3, 6), (2, 4))
    planned(scheduler, 3)
    assert new.status == "waiting"
    for request in (new, new, old, old):
        scheduler.finish(request)
        assert request.status == "finished"
    assert scheduler.idle and pages.free == 4


def test_rows_of_who_left_since_the_plan_do_not_count():
    scheduler = scheduler_of()
    stays, leaves = made(scheduler, (2, 5), (2, 1))
    rows = scheduler.next()
    scheduler.cancel(leaves)
    assert scheduler.advance(rows) == []
    assert (stays.read, stays.length, leaves.read, leaves.length) == (2, 3, 0, 2)
    assert scheduler.advance(rows) == [] and stays.length == 3  # nor does a pass count twice


def test_the_last_token_takes_no_column():
    pages = PageLedger(1 + 2, 4, 1)
    scheduler = scheduler_of(pages, max_rows=1)
    (request,) = made(scheduler, (5, 4))
    assert request.num_columns == pages.most_columns == 8
    planned(scheduler, 4)
    assert request.status == "finished" and request.read == 8


def test_a_store_is_told_which_slots_changed():
    pages = PageLedger(6, 2, 3)
    assert pages.reach(1, 3) and pages.reach(2, 0)
    assert pages.table == [[], [1, 2], []] and pages.columns == [0, 4, 0]
    assert set(pages.take_changes()) == {1}
    assert pages.reach(1, 4) and not pages.take_changes()
    assert not pages.reach(2, 7) and pages.free == 3  # all or nothing
    assert not pages.reach(2, 2, spare=3) and not pages.take_changes()
    assert pages.reach(2, 2, spare=2)
    pages.release(1)
    pages.release(1)
    assert set(pages.take_changes()) == {1, 2} and pages.free == 4
    assert pages.table == [[], [], [3]] and pages.columns == [0, 0, 2]


LIMITS = ["chunk", "budget", "max_rows"]
ABSURD = [0, -1, 2**31, 10**5000, 1.0, True, "64", [4]]


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", LIMITS)
def test_a_policy_says_what_is_wrong(name, value):
    with pytest.raises(ScheduleError, match=rf"^{name} is .*, but it must be a whole number from 1 to"):
        Schedule(**{name: value})


def test_a_policy_joins_or_does_not():
    with pytest.raises(ScheduleError, match="joins is 'no', but it must be True or False"):
        Schedule(joins="no", max_rows=2)
    with pytest.raises(ScheduleError, match="aligned is True, so .* leave out chunk, budget, joins"):
        Schedule(aligned=True, chunk=4)
    for wrong in ({"joins": True}, {"chunk": 4}, {"chunk": 1, "budget": 3}):
        with pytest.raises(ScheduleError, match="shortest_first is True, so .* set chunk to 1, and leave out budget"):
            Schedule(shortest_first=True, **wrong)
    for wrong in ({"budget": 6}, {"joins": True}, {"chunk": 4}):
        with pytest.raises(ScheduleError, match="max_rows is None, so a batch begins together"):
            Schedule(**wrong)
    with pytest.raises(ScheduleError, match="all that come together; leave out max_rows"):
        Schedule(aligned=True, max_rows=2)


def test_a_step_has_a_token_for_each_row():
    assert Schedule(budget=4, max_rows=4).most_tokens(100) == 4
    with pytest.raises(ScheduleError, match="budget is 3, but it must be at least max_rows, which is 4: .* fewer rows"):
        Schedule(budget=3, max_rows=4)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Request((), 4), "no token"),
        (lambda: Request("text", 4), "prompt is 'text', but it must be a tuple of token ids"),
        (lambda: Request(5, 4), "prompt is 5, but"),
        (lambda: Request((1,), 0), "max_new_tokens is 0, but it must be a whole number from 1"),
        (lambda: Request((1,), -3), "max_new_tokens is -3"),
        (lambda: PageLedger(1, 16, 1), "num_pages is 1, but it must be a whole number from 2"),
        (lambda: PageLedger(4, 0, 1), "page is 0"),
        (lambda: PageLedger(4, 16, 0), "num_slots is 0"),
        (lambda: Slab(0, 4), "num_slots is 0"),
        (lambda: Slab(1, -4), "columns is -4"),
        (lambda: scheduler_of(Slab(2, 8)), "max_rows is 4, but the KV cache has 2 slots"),
    ],
)
def test_what_cannot_be_is_told(wrong, says):
    with pytest.raises((PromptError, ScheduleError), match=says):
        wrong()


@pytest.mark.parametrize(
    ("length", "new", "says"),
    [
        (50, 15, "would pass the model's context of 64 tokens. Ask for at most 14 new tokens, or shorten the prompt."),
        (64, 1, "has 64 tokens; with 1 new one it would pass the model's context of 64 tokens. Shorten the prompt."),
        (
            30,
            12,
            "with 12 new ones it would pass the KV cache, which holds 40 columns. Ask for at most 11 new .* or give",
        ),
        (41, 1, r"which holds 40 columns. Shorten the prompt, or give .* more (pages \(mem.*pages\)|columns)."),
    ],
)
@pytest.mark.parametrize("ledger", [lambda: PageLedger(1 + 5, 8, 4), lambda: Slab(4, 40)], ids=["pages", "slab"])
def test_a_request_that_is_too_long_changes_nothing(ledger, length, new, says):
    scheduler = scheduler_of(ledger())
    server = Server(scheduler, random.Random(0))
    serve_later = Request((1, 2, 3), 38)  # the longest that fits
    server.add(serve_later)
    server.step()
    refused = Request((7,) * length, new)
    with pytest.raises(PromptError, match=says):
        scheduler.add(refused)
    assert refused.status == "new" and refused not in scheduler.waiting
    with pytest.raises(ScheduleError, match="unknown"):
        scheduler.cancel(refused)
    server.end()


def test_cancelling_twice_or_what_is_unknown_changes_nothing():
    server = Server(scheduler_of(max_rows=1), random.Random(0))
    running, waiting, stays = Request((1, 2), 20), Request((3,), 5), Request((4,), 5)
    for request in (running, waiting, stays):
        server.add(request)
    server.step()
    for request in (waiting, running):
        server.scheduler.cancel(request)
        server.cancelled.add(request)
        with pytest.raises(ScheduleError, match="cannot be cancelled: it was cancelled before, or has all its tokens"):
            server.scheduler.cancel(request)
    elsewhere = scheduler_of()
    (other,) = made(elsewhere, (1, 1))
    for unknown in (other, Request((1,), 1), None, 3):
        with pytest.raises(ScheduleError, match="is unknown to this scheduler"):
            server.scheduler.cancel(unknown)
    assert other.status == "waiting" and list(elsewhere.waiting) == [other]
    server.end()


def test_a_request_is_added_once():
    scheduler = scheduler_of()
    (request,) = made(scheduler, (1, 1))
    for again in (request, (1, 2, 3)):
        with pytest.raises(ScheduleError, match="added once"):
            scheduler.add(again)
    planned(scheduler, 1)
    with pytest.raises(ScheduleError, match="<Request, finished: 1 prompt token, 1 of 1 new ones> cannot be added"):
        scheduler.add(request)
    assert scheduler.idle


def test_a_step_of_many_rows_is_planned_in_a_fraction_of_it():
    """0.1 to 0.2 ms for 256 rows that decode, on one core of 2026; a GPU waits for this between two steps."""
    scheduler = scheduler_of(PageLedger(60_000, 16, 256), max_rows=256, budget=2048, chunk=512)
    scheduler.context = 4096
    made(scheduler, *[(50 + number % 16, 1000) for number in range(256)])
    times = []
    for _ in range(150):
        begin = time.perf_counter()
        rows = scheduler.next()
        scheduler.advance(rows)
        if all(row.start for row in rows) and len(rows) == 256:
            times.append(time.perf_counter() - begin)
    assert len(times) > 100 and min(times) < 0.5e-3


def test_it_is_imported_without_torch():
    code = "import sys, eet_lab.scheduling; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
