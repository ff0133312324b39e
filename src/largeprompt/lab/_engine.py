"""Which engine carries a run out."""

from typing import Any

from largeprompt.dynamics import AbstractTrainer, ReferenceTrainer, Training


def trainer_for(training: Training, layers: Any, engine: str) -> AbstractTrainer:
    """The trainer that the engine's own rule chooses."""
    try:
        from largeprompt.engine import trainer_for as chosen  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        return ReferenceTrainer(training, layers)
    return chosen(training, layers, engine=engine)
