"""What outputs of a network rest on: weights on its prompt, influence, error bars. Needs PyTorch."""

from ._weighted import WeightedPrompt as WeightedPrompt
from ._weighted import weighted as weighted
