"""Training: batches of examples in, steps of the optimizer out. It knows `Parts`, as engines do, and no technique."""

from eet_lab.training.data import Examples, Rows
from eet_lab.training.demos import masked
from eet_lab.training.launch import launch, launch_on_ray
from eet_lab.training.run import Evaluation, TrainRun, train
from eet_lab.training.settings import TrainSettings
from eet_lab.training.step import Step
from eet_lab.training.tasks import IGNORED, Example
from eet_lab.training.trainer import Trainer

__all__ = [
    "IGNORED",
    "Evaluation",
    "Example",
    "Examples",
    "Rows",
    "Step",
    "TrainRun",
    "TrainSettings",
    "Trainer",
    "launch",
    "launch_on_ray",
    "masked",
    "train",
]
