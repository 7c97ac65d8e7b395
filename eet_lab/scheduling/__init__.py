"""Which requests share a pass, and what each of them reads, by counting. No torch in here."""

from eet_lab.imports import on_demand
from eet_lab.scheduling.dynamic_program import cheapest
from eet_lab.scheduling.pages import HIDDEN, Held, Ledger, PageLedger, Slab
from eet_lab.scheduling.policies import (
    POLICIES,
    ContinuousBatching,
    DynamicProgram,
    LengthBuckets,
    NaivePadding,
    NoBatching,
    TokenBudget,
    parse_policy,
)
from eet_lab.scheduling.prefix_caching import SharedPageLedger
from eet_lab.scheduling.request import Request, Row, TokenLogprobs
from eet_lab.scheduling.run_ahead import LEAD_MS
from eet_lab.scheduling.schedule import LEFT_PADDED, PACKED, TOKEN_BY_TOKEN, UP_TO_THE_SHORTEST, Schedule
from eet_lab.scheduling.scheduler import Scheduler

__all__ = [
    "HIDDEN",
    "LEAD_MS",
    "LEFT_PADDED",
    "PACKED",
    "POLICIES",
    "TOKEN_BY_TOKEN",
    "UP_TO_THE_SHORTEST",
    "ContinuousBatching",
    "Drawn",
    "DynamicProgram",
    "Gamma",
    "Held",
    "Ledger",
    "LengthBuckets",
    "LogNormal",
    "NaivePadding",
    "NoBatching",
    "PageLedger",
    "Request",
    "Row",
    "Schedule",
    "Scheduler",
    "SharedPageLedger",
    "Slab",
    "TokenBudget",
    "TokenLogprobs",
    "Traffic",
    "Uniform",
    "cheapest",
    "load_cost",
    "make_traffic",
    "parse_policy",
    "read_lengths",
    "read_trace",
    "save_cost",
    "simulate_traffic",
]

_TRAFFIC = ("Drawn", "Gamma", "LogNormal", "Traffic", "Uniform", "make_traffic", "read_lengths")
_HOMES = {
    **dict.fromkeys(("load_cost", "save_cost"), "eet_lab.scheduling.cost_files"),
    **dict.fromkeys(_TRAFFIC, "eet_lab.scheduling.traffic"),
    "read_trace": "eet_lab.scheduling.trace",
    "simulate_traffic": "eet_lab.scheduling.simulator",
}
"""What needs numpy, which policies and schedulers do without."""

__getattr__ = on_demand(__name__, _HOMES)
