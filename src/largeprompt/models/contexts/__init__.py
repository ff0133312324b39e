"""Which sentences of a context carry a language model's answer. Needs PyTorch."""

from ._attribute import attribute as attribute
from ._attribution import Attribution as Attribution
from ._prompt import ContextPrompt as ContextPrompt
