"""The parts of `run_h200.py`: what is run, in which session, and what is recorded of it."""
