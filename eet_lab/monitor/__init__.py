"""Watching a run: sources of measurements and the thread that samples them."""

from __future__ import annotations

from eet_lab.monitor.free import free_bytes_of
from eet_lab.monitor.sampler import Sampler
from eet_lab.monitor.sources import PsutilSource, Sample, Source, open_source, record

__all__ = ["PsutilSource", "Sample", "Sampler", "Source", "free_bytes_of", "open_source", "record"]
