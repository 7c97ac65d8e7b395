"""Peers: what the user would run otherwise, with the same weights and prompts.

`PEERS` names them all; each knows why it cannot run on a device. To add one: a `Peer`, and its line in `PEERS` and
`make`.
"""

from __future__ import annotations

from collections.abc import Sequence

from eet_lab.bench.peers.huggingface import MODES, HuggingFace, Mode, to_hf
from eet_lab.bench.peers.peer import Peer, Timing
from eet_lab.bench.peers.static_decoder import StaticDecoder, TorchCompile, TorchGraphs
from eet_lab.engine.settings import Settings
from eet_lab.errors import OutOfMemory, first_line
from eet_lab.models.decoder import Decoder

PEERS: dict[str, Mode | type[TorchGraphs]] = {each.name: each for each in (*MODES, TorchGraphs, TorchCompile)}


def make(
    names: Sequence[str], model: Decoder, rows: Sequence[Sequence[int]], settings: Settings
) -> tuple[list[Peer], dict[str, str]]:
    """The peers of those names, and why others could not be made.

    The modes of transformers share one copy of the weights, for which there may be no memory.
    """
    made: list[Peer] = []
    absent: dict[str, str] = {}
    hf = None
    for name in names:
        kind = PEERS[name]
        try:
            if isinstance(kind, Mode):
                hf = hf or to_hf(model)
                made.append(HuggingFace(kind, hf, rows, settings))
            else:
                made.append(kind(model, rows, settings))
        except OutOfMemory as error:
            absent[name] = first_line(error)
    return made, absent


__all__ = ["PEERS", "HuggingFace", "Mode", "Peer", "StaticDecoder", "Timing", "make", "to_hf"]
