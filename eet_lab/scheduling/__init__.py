"""Which requests share a pass, and what each of them reads, by counting. No torch in here."""

from eet_lab.scheduling.pages import HIDDEN, Held, Ledger, PageLedger, Slab
from eet_lab.scheduling.prefix_caching import SharedPageLedger
from eet_lab.scheduling.request import Request, Row, TokenLogprobs
from eet_lab.scheduling.schedule import LEFT_PADDED, PACKED, TOKEN_BY_TOKEN, UP_TO_THE_SHORTEST, Schedule
from eet_lab.scheduling.scheduler import Scheduler

__all__ = [
    "HIDDEN",
    "LEFT_PADDED",
    "PACKED",
    "TOKEN_BY_TOKEN",
    "UP_TO_THE_SHORTEST",
    "Held",
    "Ledger",
    "PageLedger",
    "Request",
    "Row",
    "Schedule",
    "Scheduler",
    "SharedPageLedger",
    "Slab",
    "TokenLogprobs",
]
