"""Serving: what needs both a model and traffic. What only counts, policies and their simulation, is in `scheduling`."""

from eet_lab.imports import on_demand

__getattr__ = on_demand(__name__, {"load": "eet_lab.serving.load"})
