"""Which requests share a pass, and what each of them reads: continuous batching, by counting. No torch in here."""

from eet_lab.scheduling.pages import HIDDEN, Ledger, Pages, Slab
from eet_lab.scheduling.request import Request, Row
from eet_lab.scheduling.schedule import Schedule
from eet_lab.scheduling.scheduler import Scheduler

__all__ = ["HIDDEN", "Ledger", "Pages", "Request", "Row", "Schedule", "Scheduler", "Slab"]
