"""Serving: what needs both a model and traffic. What only counts, policies and their simulation, is in `scheduling`."""
