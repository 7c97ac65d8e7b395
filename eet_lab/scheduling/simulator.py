"""Discrete events over a cost table: a policy serves traffic in warped time, pass by pass.

A decoder's passes are planned by the `Scheduler` that plans those of an engine; only time is made of a table.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import inf

import numpy as np

from eet_lab.errors import CostError, ScheduleError
from eet_lab.progress import Cancel, Progress
from eet_lab.scheduling.cost import CostTable, DecoderCost, EncoderCost
from eet_lab.scheduling.generating import Generating, Launched, times_of
from eet_lab.scheduling.pages import Ledger, Slab
from eet_lab.scheduling.policy import BasePolicy, Plan
from eet_lab.scheduling.queued import Queue, Queued
from eet_lab.scheduling.record import Record
from eet_lab.scheduling.run_ahead import RunAhead
from eet_lab.scheduling.scheduler import Scheduler
from eet_lab.scheduling.served import Served
from eet_lab.scheduling.traffic import Traffic
from eet_lab.scheduling.whole import MOST
from eet_lab.words import visible

NOTHING: Plan[Queued] = Plan(())
"""What a policy plans for nobody."""


def simulate_traffic(
    traffic: Traffic,
    policy: BasePolicy,
    cost: CostTable,
    *,
    ledger: Ledger | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Served:
    """Serve the traffic by the policy, until all are done; each pass takes what the cost table says.

    `ledger` is the KV cache of a policy that joins; None: each slot has room for the longest request. Errors: CostError
    for passes beyond the table; ScheduleError for a policy that is not for such a model, or never serves a request;
    PromptError for one that fits no cache; Cancelled.
    """
    traffic = check_fits(traffic, policy, cost)
    if ledger is not None and not (policy.joins and isinstance(cost, DecoderCost)):
        raise ScheduleError("A ledger is given, but only a policy that joins has one for all requests; leave it out.")
    queue, record = Queue(traffic), Record(len(traffic), progress, cancel)
    preempted = 0
    if isinstance(cost, EncoderCost):
        _read_texts(queue, policy, cost, record)
    elif policy.joins:
        longest = int((traffic.lengths + traffic.new_tokens).max())
        preempted = _join(queue, policy, cost, record, ledger or Slab(policy.schedule.max_rows or 1, longest))
    else:
        _generate_groups(queue, policy, cost, record)
    source = visible(f"{cost.source.model} on {cost.source.device}")
    return record.served(traffic, str(policy), source, preempted)


def check_fits(traffic: Traffic, policy: BasePolicy, cost: CostTable) -> Traffic:
    """The traffic as such a model serves it: an encoder tells one result of each text, whatever is asked for.

    ScheduleError for a policy that is not for such a model; CostError for requests longer than what was measured.
    """
    stage, model = ("encode", "an encoder") if isinstance(cost, EncoderCost) else ("generate", "a decoder")
    if stage not in policy.stages:
        raise ScheduleError(f"{policy.name} is not for {model}, which this cost table is of. Take another policy.")
    totals = traffic.lengths if stage == "encode" else traffic.lengths + traffic.new_tokens
    if (longest := int(totals.max())) > cost.most_length:
        raise CostError(
            f"The longest request has {longest:,} tokens, but {visible(cost.source.model)} was measured up to "
            f"{cost.most_length:,}. Take shorter ones, or measure a larger table."
        )
    return replace(traffic, new_tokens=np.ones_like(traffic.new_tokens)) if stage == "encode" else traffic


def _read_texts(queue: Queue, policy: BasePolicy, cost: EncoderCost, record: Record) -> None:
    """An encoder: a group is a pass, and a plan takes the sum of its passes.

    A server on a GPU lays a group out while another is computed, so there a plan takes no longer than that.
    """
    is_packed = policy.is_packed
    for group in queue.groups(policy, cost):
        lengths, begin_ms = [each.length for each in group], queue.now_ms
        total, rectangle = sum(lengths), len(lengths) * max(lengths)
        took = cost.packed(lengths) if is_packed else cost.at(max(lengths), len(lengths))
        queue.now_ms = end_ms = begin_ms + took
        record.done += len(group)
        record.add(begin_ms, end_ms, len(group), total, 0, 0 if is_packed else rectangle - total)
        for number, *_ in group:
            record.start[number], record.first[number], record.last[number] = begin_ms, end_ms, end_ms


def _generate_groups(queue: Queue, policy: BasePolicy, cost: DecoderCost, record: Record) -> None:
    """A decoder whose groups begin together, and run until their last answer is complete."""
    times = times_of(cost)
    for group in queue.groups(policy, cost):
        longest = max(each.length for each in group) + max(each.new_tokens for each in group)
        generating = Generating(Scheduler(policy.schedule, Slab(len(group), longest), MOST), times, record)
        generating.add(group)
        while not generating.scheduler.idle:
            queue.now_ms = generating.step(queue.now_ms)


def _join(queue: Queue, policy: BasePolicy, cost: DecoderCost, record: Record, ledger: Ledger) -> int:
    """A decoder whose requests join while others run; how many gave way for others.

    The host is busy for `cost.host_ms` with a pass, and then reads those that have ended. It plans the next one once no
    more are left to read than it may be ahead.
    """
    scheduler, run_ahead = Scheduler(policy.schedule, ledger, MOST), RunAhead(cost.ahead)
    generating, ahead, read_ms = Generating(scheduler, times_of(cost), record), deque[Launched](), 0.0
    while True:
        queue.admit()
        plan = policy.next(queue.waiting, queue.now_ms, cost) if queue.waiting else NOTHING
        for group in plan.groups:
            queue.take(group)
            generating.add(group)
        if not scheduler.idle:
            launched = generating.launched(queue.now_ms, ahead[-1].end_ms if ahead else 0.0)
            ahead.append(launched)
            queue.now_ms = launched.host_ms
        elif ahead:
            queue.now_ms = max(queue.now_ms, ahead[-1].end_ms)
        elif queue.waiting or queue.next_ms < inf:
            queue.wait(plan, policy)
            run_ahead, read_ms = RunAhead(cost.ahead), queue.now_ms  # an engine begins anew, too
        else:
            return scheduler.num_preempted
        while ahead and (ahead[0].end_ms <= queue.now_ms or len(ahead) > run_ahead.passes(scheduler.is_full)):
            done = ahead.popleft()
            queue.now_ms = max(queue.now_ms, done.end_ms)
            generating.read(done, queue.now_ms)
            run_ahead.read(done.end_ms - read_ms)
            read_ms = done.end_ms
