import abc
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._compiled import optimised_jit
from largeprompt.attention import AbstractLayer
from largeprompt.icl import (
    AbstractTask,
    as_predictor,
    as_task,
    held_tokens,
    norm,
    prediction,
    prompt_for,
    refuse_beyond_memory,
)

from ._optimiser import SGD, AbstractOptimiser

FAR = 1e8  # a parameter norm from which training counts as diverged
_TOKENS_AT_ONCE = 2**20
Layers = tuple[AbstractLayer, ...]


class Training(eqx.Module):
    r"""Stochastic gradient descent on fresh prompts, $\theta \leftarrow \theta - \gamma\,c\,\nabla\frac1B\sum_b\ell_b$.

    Each step draws `batch` instances of the task with prompts of `L` tokens (`L = inf`: their laws), all from `seed`.
    `rate` is $\gamma$; `loss_factor` is $c$, 1 for the paper's half mean squared error and 2 for the mean squared error
    of common code; another `optimiser` makes other steps of the same gradients. Layers trained side by side see the
    same prompts. Paper: Appendix A.
    """

    task: AbstractTask
    L: int | float = eqx.field(static=True)
    batch: int = eqx.field(static=True)
    rate: float = eqx.field(static=True)
    loss_factor: float = eqx.field(static=True)
    seed: int = eqx.field(static=True)
    optimiser: AbstractOptimiser = eqx.field(static=True)

    def __init__(
        self,
        task: AbstractTask,
        L: int | float,
        *,
        batch: int = 128,
        rate: float = 1e-3,
        loss_factor: float = 1.0,
        seed: int = 0,
        optimiser: AbstractOptimiser = SGD(),  # noqa: B008
    ):
        self.task, self.L = as_task(task), checks.prompt_length(L)
        self.batch = checks.count("batch", batch)
        self.rate = float(checks.number("rate", rate))
        self.loss_factor = float(checks.number("loss_factor", loss_factor))
        for name, value in (("rate", self.rate), ("loss_factor", self.loss_factor)):
            if value <= 0:
                raise ValueError(f"{name} is {value:g}; it must be above 0")
        self.seed = checks.count("seed", seed, at_least=0)
        if self.seed >= 2**63:
            raise ValueError(f"seed is {self.seed}; it must be below 2**63")
        if not isinstance(optimiser, AbstractOptimiser):
            raise ValueError(f"optimiser is {optimiser!r}; it must be an optimiser such as SGD(), Momentum() or Adam()")
        self.optimiser = optimiser

    def with_seed(self, seed: int) -> "Training":
        """The same training on other prompts."""
        options: Any = {name: getattr(self, name) for name in ("batch", "rate", "loss_factor", "optimiser")}
        return Training(self.task, self.L, seed=seed, **options)


class State(NamedTuple):
    """Layers after `step` steps. `diverged[i]` is the step at which layer i left all bounds; it stays where it was.

    `moments` are what the optimiser carries from step to step, each as layers of the same shapes; those of a layer that
    diverged mean nothing.
    """

    step: int
    layers: Layers
    diverged: tuple[int | None, ...]
    moments: tuple[Layers, ...] = ()


class AbstractTrainer(abc.ABC):
    """One way to carry a `Training` out. Steps count from 0, and the random numbers of a step depend on it alone.

    So training may be cut into pieces anywhere: from 0 to n and from n to m ends, bit for bit, where from 0 to m does.
    The layers of a state have NumPy arrays as parameters.
    """

    name: ClassVar[str]

    def __init__(self, training: Training, layers: Layers):
        self._training = training
        for layer in layers:
            as_predictor(layer, training.task)
        self._start = layers

    def start(self) -> State:
        """The state before the first step."""
        layers = jax.tree.map(lambda leaf: np.asarray(leaf) if eqx.is_array(leaf) else leaf, self._start)
        zeros = jax.tree.map(lambda leaf: np.zeros_like(leaf) if eqx.is_array(leaf) else leaf, layers)
        return State(0, layers, (None,) * len(layers), (zeros,) * self._training.optimiser.moments)

    def advance(self, state: State, stop: int) -> State:
        """The state after the steps from that of `state` up to, not including, `stop`."""
        stop = checks.count("stop", stop, at_least=0)
        if not state.step <= stop < 2**32:
            raise ValueError(f"stop is {stop}; it must lie between the state's step {state.step} and 2**32 - 1")
        return self._advance(state, stop)

    @abc.abstractmethod
    def _advance(self, state: State, stop: int) -> State: ...


class ReferenceTrainer(AbstractTrainer):
    """Plain JAX: samples every token and differentiates automatically. Any task, any loss, any layers, any device.

    Of prompts too long to be held, linear attention on Gaussian tokens reads a second moment of the same law; where
    other layers would have to, one line says so.
    """

    name = "reference"

    def __init__(self, training: Training, layers: Layers):
        super().__init__(training, layers)
        refuse_beyond_memory(held_tokens(layers, training.task, training.L), training.task.dim)

    def _advance(self, state: State, stop: int) -> State:
        static = eqx.filter(state.layers, eqx.is_inexact_array, inverse=True)
        moving = jax.tree.map(jnp.asarray, eqx.filter((state.layers, *state.moments), eqx.is_inexact_array))
        diverged = jnp.asarray([-1 if at is None else at for at in state.diverged], int)
        root = jax.random.key(self._training.seed)
        training = self._training.with_seed(0)  # which seed it is, the compiled step need not know
        step = state.step
        while step < stop and bool((diverged < 0).any()):
            moving, diverged = _descend(training, moving, static, diverged, root, jnp.asarray(step, jnp.uint32))
            step += 1
        layers, *moments = (eqx.combine(part, static) for part in jax.tree.map(np.asarray, moving))
        return State(stop, layers, tuple(None if at < 0 else int(at) for at in diverged), tuple(moments))


def batch_gradient(training: Training, layers: Layers, key: PRNGKeyArray) -> Layers:
    """The gradient of the mean loss of one batch, for each layer, by automatic differentiation."""
    task, L = training.task, training.L
    arrays, static = eqx.partition(layers, eqx.is_inexact_array)

    def loss(arrays, drawn):
        outputs = [layer._output(drawn.measure, drawn.query) for layer in eqx.combine(arrays, static)]
        return sum(task._loss(prediction(output, task), drawn.target) for output in outputs)

    def of_one_prompt(index):
        of_instance, of_tokens = jax.random.split(jax.random.fold_in(key, index))
        drawn = prompt_for(layers, task._draw(of_instance), of_tokens, L)
        return jax.grad(loss)(arrays, drawn)

    numbers = task.dim * held_tokens(layers, task, L)
    at_once = max(1, min(training.batch, _TOKENS_AT_ONCE // numbers))
    each = jax.lax.map(of_one_prompt, jnp.arange(training.batch), batch_size=at_once)
    return jax.tree.map(lambda leaf: training.loss_factor * leaf.mean(axis=0), each)


# One step a call, not a loop of them: inside a loop XLA's code for the processor runs thirty times slower.
@optimised_jit
def _descend(training: Training, moving, static, diverged, root: PRNGKeyArray, step: Array):
    """The layers' arrays and, after them, the moments, a step later."""
    gradient = batch_gradient(training, eqx.combine(moving[0], static), jax.random.fold_in(root, step))
    moved = _after_a_step(training, *moving, gradient=gradient, t=step.astype(float) + 1)
    within = jnp.stack([norm(layer) <= FAR for layer in moved[0]])  # false for NaN as well
    diverged = jnp.where((diverged < 0) & ~within, step.astype(diverged.dtype), diverged)

    def unless_diverged(new, old):
        parts = zip(new, old, diverged, strict=True)
        return tuple(jax.tree.map(lambda a, b, at=at: jnp.where(at < 0, a, b), *both) for *both, at in parts)

    return tuple(map(unless_diverged, moved, moving)), diverged


def _after_a_step(training: Training, arrays, *moments, gradient, t: Array):
    """The arrays and the moments after the t-th step."""
    optimiser, tree = training.optimiser, jax.tree.structure(arrays)
    steps = [
        optimiser.direction(slope, tuple(own), t)
        for slope, *own in zip(*map(jax.tree.leaves, (gradient, *moments)), strict=True)
    ]
    moved = [leaf - training.rate * step for leaf, (step, _) in zip(jax.tree.leaves(arrays), steps, strict=True)]
    return tuple(map(tree.unflatten, (moved, *zip(*(after for _, after in steps), strict=True))))
