import numpy as np

from largeprompt.dynamics import FAR, AbstractTrainer, Layers, State, Training

from ._kernel import trainer, workspace
from ._training_arrays import TrainingArrays, refusal, with_arrays
from ._update import coefficients


class FusedTrainer(AbstractTrainer):
    """Gaussian regression, compiled: the same law as the reference, through what a gradient sees of a prompt.

    One layer, or a softmax and a linear one on the same prompts; each of one head or of several of one shape, in (U, V)
    or in (K, Q, V, O) arrays. A run takes one core, and other threads go on meanwhile.
    """

    name = "fused"

    def __init__(self, training: Training, layers: Layers):
        reason = refusal(training, layers)
        if reason:
            raise ValueError(f"the fused engine does not apply: {reason}; use engine='reference'")
        super().__init__(training, layers)
        arrays = self._arrays = TrainingArrays(training, layers)
        columns = (0 if w is None else 2 * len(w.K) for w in (arrays.softmax, arrays.linear))
        self._space = workspace(training.task.dim - 1, *columns)

    def _advance(self, state: State, stop: int) -> State:
        training, arrays = self._training, self._arrays
        parts = arrays.weights_of(state.layers)
        diverged = np.array([-1 if at is None else at for at in arrays.ordered(state.diverged)])
        moments = arrays.vectors(state.moments)
        trainer(arrays.softmax is not None, arrays.linear is not None)(
            state.step,
            stop,
            arrays.length,
            training.batch,
            training.rate * training.loss_factor,
            FAR,
            training.seed,
            arrays.law,
            parts[0],
            parts[-1],
            self._space,
            diverged,
            coefficients(training),
            moments,
        )
        layers = tuple(
            with_arrays(layer, w.K, w.Q, w.V, w.O)
            for layer, w in zip(state.layers, arrays.in_order(parts), strict=True)
        )
        ends = (None if end < 0 else int(end) for end in arrays.in_order(diverged.tolist()))
        return State(stop, layers, tuple(ends), arrays.moments(state.moments, moments))
