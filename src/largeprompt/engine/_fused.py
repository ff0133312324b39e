import numpy as np

from largeprompt.dynamics import FAR, AbstractTrainer, Layers, State, Training

from ._form import Form, refusal, with_arrays
from ._kernel import trainer, workspace


class FusedTrainer(AbstractTrainer):
    """Gaussian regression, compiled: the same law as the reference, through what a gradient sees of a prompt.

    One layer, or a softmax and a linear one on the same prompts; each of one head or of several of one shape, in (U, V)
    or in (K, Q, V, O) form. One core a run, and other threads go on meanwhile.
    """

    name = "fused"

    def __init__(self, training: Training, layers: Layers):
        reason = refusal(training, layers)
        if reason:
            raise ValueError(f"the fused engine does not apply: {reason}; use engine='reference'")
        super().__init__(training, layers)
        form = self._form = Form(training, layers)
        columns = (0 if w is None else 2 * len(w.K) for w in (form.softmax, form.linear))
        self._space = workspace(training.task.dim - 1, *columns)

    def _advance(self, state: State, stop: int) -> State:
        training, form = self._training, self._form
        parts = form.parts(state.layers)
        diverged = np.array([-1 if at is None else at for at in form.ordered(state.diverged)])
        trainer(form.softmax is not None, form.linear is not None)(
            state.step,
            stop,
            form.length,
            training.batch,
            training.rate * training.loss_factor,
            FAR,
            training.seed,
            form.law,
            parts[0],
            parts[-1],
            self._space,
            diverged,
        )
        layers = tuple(
            with_arrays(layer, w.K, w.Q, w.V, w.O) for layer, w in zip(state.layers, form.in_order(parts), strict=True)
        )
        ends = (None if end < 0 else int(end) for end in form.in_order(diverged.tolist()))
        return State(stop, layers, tuple(ends))
