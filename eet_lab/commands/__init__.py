"""The sub-commands of `eet-lab`, in the order in which help shows them: one file each, one line here."""

from __future__ import annotations

from eet_lab.commands import bench, compare, doctor, generate, lab, load, serve, simulate, techniques, train
from eet_lab.commands.command import Command

COMMANDS: tuple[Command, ...] = (
    lab.COMMAND,
    doctor.COMMAND,
    techniques.COMMAND,
    generate.COMMAND,
    serve.COMMAND,
    load.COMMAND,
    compare.COMMAND,
    bench.COMMAND,
    train.COMMAND,
    simulate.COMMAND,
)
