"""What traffic and policies suit a cost table, where nobody says: nothing goes beyond what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eet_lab.scheduling.cost import CostTable
from eet_lab.scheduling.policies import MOST_TOKENS, POLICIES, NoBatching, parse_policy
from eet_lab.scheduling.policy import BasePolicy
from eet_lab.scheduling.simulator import simulate_traffic
from eet_lab.scheduling.traffic import AT_ONCE, Gamma, Lengths, Traffic, make_traffic

SAMPLE = 200
"""The requests on which a capacity is found out."""


def capacity(policy: str, lengths: Lengths, answers: Lengths, table: CostTable) -> float:
    """Requests a second that a policy in words can serve, of requests and answers of such lengths: all at once."""
    sample = make_traffic(SAMPLE, Gamma(AT_ONCE), lengths, answers)
    [one] = fitting_policies([policy], sample, table)
    return simulate_traffic(sample, one, table).requests_per_s


def one_by_one_rate(lengths: Lengths, answers: Lengths, table: CostTable) -> float:
    """The same of no batching."""
    return capacity(NoBatching.name, lengths, answers, table)


def usual_lengths(table: CostTable) -> str:
    """Lengths that leave room for an answer, and for company, as `read_lengths` reads them: up to a quarter."""
    return f"1-{max(table.most_length // 4, 1)}"


def fitting_policies(words: Sequence[str] | None, traffic: Traffic, table: CostTable) -> list[BasePolicy]:
    """The policies that are named, or all for such a model; what their knobs leave open, the table's reach decides.

    Errors: ScheduleError for words that name none.
    """
    decodes, tokens = table.kind == "decoder", min(table.most_tokens, MOST_TOKENS)
    limits = dict[str, Any](max_rows=table.most_rows, budget=tokens)
    if decodes:  # a group's prompts are read in one pass
        limits["max_rows"] = max(min(table.most_rows, table.most_tokens // int(traffic.lengths.max())), 1)
    joining = limits | {"max_rows": table.most_rows, "chunk": min(tokens, 256)}
    stage = "generate" if decodes else "encode"
    names = words or [name for name, kind in POLICIES.items() if stage in kind.stages]
    is_joining = {name: kind.joins for name, kind in POLICIES.items()}
    return [parse_policy(name, joining if is_joining.get(name.partition(":")[0]) else limits) for name in names]


def by_title(policies: Sequence[BasePolicy]) -> dict[str, BasePolicy]:
    """Policies by what a figure calls them: their titles, or their words where several have the same one."""
    titles = [policy.title for policy in policies]
    return {each.title if titles.count(each.title) == 1 else str(each): each for each in policies}
