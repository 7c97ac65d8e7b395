"""What is wrong with this machine, and what to type: `diagnose()`."""

from __future__ import annotations

from collections.abc import Callable

from eet_lab.doctor.check import Check, to_html, to_text

__all__ = ["Check", "diagnose", "to_html", "to_text"]


def diagnose() -> list[Check]:
    """Look at everything that a run needs, in the order of dependence.

    Takes a second or two and changes nothing but for making the cache folder. In a notebook it
    also compares the kernel's environment with the server's.
    """
    from eet_lab.doctor import gpu, machine, notebook, pins, software

    looks: dict[str, Callable[[], Check | list[Check]]] = {
        "Python": software.check_python,
        "packages": software.check_packages,
        "versions": pins.check_pins,
        "GPU": gpu.inspect_gpu,
        "notebook": notebook.inspect_notebook,
        "disk": machine.check_disk,
        "cache": machine.check_cache,
    }
    return [check for name, look in looks.items() for check in software.guarded(name, look)]
