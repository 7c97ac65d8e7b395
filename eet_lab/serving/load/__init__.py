"""Load: requests that are sent to a server when they are due, and how long their answers take.

    from eet_lab.scheduling.traffic import Gamma, Uniform, make_traffic
    from eet_lab.serving.load import start_load

    traffic = make_traffic(500, Gamma(rate=20), Uniform(5, 100), Uniform(10, 50))
    loading = start_load("http://127.0.0.1:8000", traffic)      # a cell that returns at once
    loading.result()

It needs no web framework, and no torch.
"""

from __future__ import annotations

from eet_lab.serving.load.result import Loaded
from eet_lab.serving.load.run import Loading, run_load, start_load
from eet_lab.serving.load.target import Target

__all__ = ["Loaded", "Loading", "Target", "run_load", "start_load"]
