from typing import Literal, get_args

from largeprompt.dynamics import AbstractTrainer, Layers, ReferenceTrainer, Training

from ._form import refusal
from ._fused import FusedTrainer

Engine = Literal["auto", "fused", "reference"]


def trainer_for(training: Training, layers: Layers, engine: Engine = "auto") -> AbstractTrainer:
    """The trainer asked for, by default the fused one wherever it applies; its `name` says which it is."""
    if engine not in get_args(Engine):
        raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(map(repr, get_args(Engine)))}")
    fused = engine == "fused" or (engine == "auto" and refusal(training, layers) is None)
    return (FusedTrainer if fused else ReferenceTrainer)(training, layers)
