from typing import Literal, get_args

from largeprompt._device import Device, resolve_device
from largeprompt.dynamics import AbstractTrainer, Layers, ReferenceTrainer, Training

from ._fused import FusedTrainer
from ._gpu import GpuTrainer
from ._training_arrays import refusal

Engine = Literal["auto", "fused", "reference"]


def trainer_for(training: Training, layers: Layers, engine: Engine = "auto", device: Device = "cpu") -> AbstractTrainer:
    """The trainer asked for, by default the fused one wherever it applies; its `name` says which it is.

    The reference runs wherever JAX does; the fused engine on the device named, `auto` being a GPU where there is one.
    """
    if engine not in get_args(Engine):
        raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(map(repr, get_args(Engine)))}")
    if engine == "reference" or (engine == "auto" and refusal(training, layers) is not None):
        return ReferenceTrainer(training, layers)
    return (GpuTrainer if resolve_device(device, "cuda") == "gpu" else FusedTrainer)(training, layers)
