"""Slots with prompts in them, for tests that look at one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eet_lab.engine.clock import RequestClock
from eet_lab.engine.engine import Engine
from eet_lab.engine.settings import Settings
from eet_lab.engine.slots import Slots
from eet_lab.engine.token_buffer import RequestSettings
from eet_lab.scheduling import Request


@torch.inference_mode()
def opened(engine: Engine, prompts: Sequence[Sequence[int]], settings: Settings) -> Slots:
    """As `Engine.generate` opens them; each `step()` then is a pass."""
    lengths = [len(prompt) for prompt in prompts]
    schedule = engine.parts.schedule.of_at_most(len(prompts))
    columns = max(lengths) + settings.max_new_tokens
    slots = engine._open_slots(schedule, lengths, columns, settings, RequestClock())
    for row, prompt in enumerate(prompts):
        asked = RequestSettings.of(settings, engine.model.config.vocab_size, row)
        slots.add(Request(tuple(prompt), settings.max_new_tokens), asked)
    return slots
