import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from largeprompt import _checks as checks
from largeprompt._display import AbstractShown
from largeprompt.attention import AbstractLayer
from largeprompt.measures import AbstractMeasure, as_measure

Loss = Callable[[Float[Array, " k"], Float[Array, " k"]], Float[Array, ""]]


class Instance(AbstractShown):
    """One draw of a task: the law of its tokens, a query token, and what the query should be answered with."""

    measure: AbstractMeasure
    query: Float[Array, " D"]
    target: Float[Array, " k"]

    def prompt(self, key: PRNGKeyArray, L: int | float) -> "Instance":
        """The same with a prompt of `L` tokens for the law; for `L = inf`, itself."""
        return Instance(self.measure.prompt(key, L), self.query, self.target)


class AbstractTask(AbstractShown):
    r"""A law over instances $(\mu, z_q, y)$; every risk follows from it.

    $$R_L = E\,\ell\big(T[\hat\mu_L](z_q), y\big), \qquad R_\infty = E\,\ell\big(T[\mu](z_q), y\big):$$

    one definition, applied to the empirical measure of $L$ tokens of $\mu$ or to $\mu$ itself. A subclass says its
    `dim`, its `targets` and how to `_draw`; the loss is $\tfrac12\|\hat y - y\|^2$ unless `with_loss` gives another.
    Paper: Section 4, Equations (2), (3) and (4).
    """

    @property
    @abc.abstractmethod
    def dim(self) -> int:
        """Dimension of a token."""

    @property
    @abc.abstractmethod
    def targets(self) -> int:
        """Dimension of a target."""

    @abc.abstractmethod
    def _draw(self, key: PRNGKeyArray) -> Instance: ...

    def _loss(self, prediction: Float[Array, " k"], target: Float[Array, " k"]) -> Float[Array, ""]:
        return jnp.sum((prediction - target) ** 2) / 2

    def draw(self, key: PRNGKeyArray) -> Instance:
        """One instance."""
        drawn = self._draw(checks.key(key))
        if not isinstance(drawn, Instance):
            raise ValueError(f"_draw(key) returned a {type(drawn).__name__}; it must return an Instance")
        as_measure("the measure of an instance", drawn.measure, self.dim)
        return Instance(
            drawn.measure,
            checks.vector("the query of an instance", drawn.query, self.dim),
            checks.vector("the target of an instance", drawn.target, self.targets),
        )

    def with_loss(self, loss: Loss) -> "AbstractTask":
        """The same task judged by another smooth `loss(prediction, target)`."""
        return WithLoss(self, loss)


class AbstractChanged(AbstractTask):
    """A task with something changed; what a subclass does not change is that of `task`."""

    task: eqx.AbstractVar[AbstractTask]

    @property
    def dim(self) -> int:
        return self.task.dim

    @property
    def targets(self) -> int:
        return self.task.targets

    def _draw(self, key: PRNGKeyArray) -> Instance:
        return self.task._draw(key)

    def _loss(self, prediction: Float[Array, " k"], target: Float[Array, " k"]) -> Float[Array, ""]:
        return self.task._loss(prediction, target)


class WithLoss(AbstractChanged):
    """A task judged by a loss of the user's own."""

    task: AbstractTask
    loss: Loss = eqx.field(static=True)

    def __init__(self, task: AbstractTask, loss: Loss):
        if not callable(loss):
            raise ValueError(f"loss is {loss!r}; it must be a function (prediction, target) -> number")
        self.task, self.loss = as_task(task), loss
        vectors = (jax.ShapeDtypeStruct((task.targets,), float),) * 2
        try:
            returned = jax.eval_shape(loss, *vectors)
        except Exception as error:
            first = str(error).splitlines()[0]
            raise ValueError(f"loss(prediction, target) cannot be traced by JAX: {first}") from None
        shape = getattr(returned, "shape", None)
        if shape != ():
            what = f"is a {type(returned).__name__}" if shape is None else f"has shape {shape}"
            raise ValueError(f"loss(prediction, target) {what}; it must be one number")

    def _loss(self, prediction, target):
        return self.loss(prediction, target)


def as_task(task: object) -> AbstractTask:
    """`task` itself, once it is a task."""
    if not isinstance(task, AbstractTask):
        raise ValueError(f"task is of type {type(task).__name__}; it must be a task, such as LinearRegression(Sigma)")
    return task


def as_predictor(layer: object, task: AbstractTask) -> AbstractLayer:
    """`layer` itself, once it reads the task's tokens and puts out its targets, alone or last in a token's shape."""
    if not isinstance(layer, AbstractLayer):
        raise ValueError(f"the layer is of type {type(layer).__name__}; it must be an attention layer")
    if layer.dim != task.dim:
        raise ValueError(
            f"the layer reads tokens of dimension {layer.dim}; the task has tokens of dimension {task.dim}"
        )
    if layer.outputs not in (task.targets, task.dim):
        raise ValueError(
            f"the layer has {layer.outputs} outputs; it must have {task.targets}, or {task.dim} of which the last count"
        )
    return layer


def prediction(output: Float[Array, "*b p"], task: AbstractTask) -> Float[Array, "*b k"]:
    """The coordinates of a layer's output that answer the query: the last ones. Paper: Section 5."""
    return output[..., output.shape[-1] - task.targets :]
