"""Parts, which engines are built from, and the plain ones beside the better ones: where memory comes from, how keys
and values are kept, where tokens sit, what attention may see, how a step is launched.
"""

from eet_lab.parts.parts import Ops, Parts, misfit, replaced, unread
from eet_lab.parts.protocols import KeepsWeights

__all__ = ["KeepsWeights", "Ops", "Parts", "misfit", "replaced", "unread"]
