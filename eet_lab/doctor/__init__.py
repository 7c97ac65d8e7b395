"""What is wrong with this machine, and what to type: `diagnose()`."""

from __future__ import annotations

from eet_lab.doctor.check import Check, to_html, to_text

__all__ = ["Check", "diagnose", "to_html", "to_text"]


def diagnose() -> list[Check]:
    """Look at everything that a run needs, in the order of dependence.

    Takes a second or two and changes nothing but for making the cache folder. In a notebook it
    also compares the kernel's environment with the server's.
    """
    from eet_lab.doctor import machine, notebook, software
    from eet_lab.doctor.gpu import inspect_gpu

    return [
        software.check_python(),
        software.check_packages(),
        *inspect_gpu(),
        *notebook.inspect_notebook(),
        machine.check_disk(),
        machine.check_cache(),
    ]
