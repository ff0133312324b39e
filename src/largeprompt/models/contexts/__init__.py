"""Which sentences of a context carry a language model's answer. Needs PyTorch."""

from ._prompt import ContextPrompt as ContextPrompt
