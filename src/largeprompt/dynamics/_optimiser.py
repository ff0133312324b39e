"""How gradients become steps: plain descent, momentum and Adam, in PyTorch's conventions.

The rules are functions of numbers or of arrays: the reference applies them to arrays, the fused engine compiles them
for single entries.
"""

import abc
import dataclasses
from typing import Any, ClassVar

from largeprompt import _checks as checks


def heavy_ball(gradient: Any, velocity: Any, beta: Any) -> Any:
    r"""The velocity after a step, $v \leftarrow \beta v + g$."""
    return beta * velocity + gradient


def adam(
    gradient: Any, mean: Any, square: Any, beta1: Any, beta2: Any, epsilon: Any, unbias1: Any, unbias2: Any
) -> Any:
    r"""Adam's direction $\hat m/(\sqrt{\hat s}+\epsilon)$ and its moments after a step.

    They are $m \leftarrow \beta_1 m + (1-\beta_1)g$ and $s \leftarrow \beta_2 s + (1-\beta_2)g^2$; at the t-th step
    $\hat m = m/(1-\beta_1^t)$ and $\hat s = s/(1-\beta_2^t)$, of which `unbias1` and `unbias2` are the denominators.
    """
    mean = beta1 * mean + (1 - beta1) * gradient
    square = beta2 * square + (1 - beta2) * gradient * gradient
    return mean / unbias1 / ((square / unbias2) ** 0.5 + epsilon), mean, square


class AbstractOptimiser(abc.ABC):
    r"""How a step follows from the gradients so far, $\theta \leftarrow \theta - \gamma\,\mathrm{direction}$.

    For each parameter it carries `moments` numbers from step to step, which are 0 before the first.
    """

    moments: ClassVar[int]

    @abc.abstractmethod
    def direction(self, gradient: Any, moments: tuple[Any, ...], t: Any) -> tuple[Any, tuple[Any, ...]]:
        """The direction of the t-th step, counted from 1, and the moments after it, for one array of parameters."""

    def speed(self, batch: int, loss_factor: float) -> float:
        """How far a step of small rate goes in the time of the gradient flow of the risk, in units of the rate."""
        return loss_factor


@dataclasses.dataclass(frozen=True)
class SGD(AbstractOptimiser):
    r"""Plain descent, $\theta \leftarrow \theta - \gamma g$."""

    moments = 0

    def direction(self, gradient, moments, t):
        """The gradient itself."""
        return gradient, ()

    def __str__(self) -> str:
        return "sgd"


@dataclasses.dataclass(frozen=True)
class Momentum(AbstractOptimiser):
    r"""Polyak's heavy ball, $v \leftarrow \beta v + g$ and $\theta \leftarrow \theta - \gamma v$; not Nesterov's."""

    beta: float = 0.9
    moments = 1

    def __post_init__(self):
        _keep_share(self, "beta")

    def direction(self, gradient, moments, t):
        """The velocity."""
        velocity = heavy_ball(gradient, moments[0], self.beta)
        return velocity, (velocity,)

    def speed(self, batch, loss_factor):
        r"""A gradient that stays the same adds up to $g/(1-\beta)$."""
        return loss_factor / (1 - self.beta)

    def __str__(self) -> str:
        return f"momentum:{self.beta!r}"


@dataclasses.dataclass(frozen=True)
class Adam(AbstractOptimiser):
    r"""Adam with bias correction, $\theta \leftarrow \theta - \gamma\,\hat m/(\sqrt{\hat s}+\epsilon)$.

    Means of gradients and of their squares, as in Kingma and Ba (2015), Algorithm 1.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    moments = 2

    def __post_init__(self):
        _keep_share(self, "beta1")
        _keep_share(self, "beta2")
        object.__setattr__(self, "epsilon", float(checks.number("epsilon", self.epsilon)))
        if self.epsilon <= 0:  # a parameter without a gradient would move by 0/0
            raise ValueError(f"epsilon is {self.epsilon:g}; it must be above 0")

    def direction(self, gradient, moments, t):
        """The corrected mean of gradients over the root of that of their squares."""
        numbers = self.beta1, self.beta2, self.epsilon, 1 - self.beta1**t, 1 - self.beta2**t
        direction, mean, square = adam(gradient, moments[0], moments[1], *numbers)
        return direction, (mean, square)

    def speed(self, batch, loss_factor):
        r"""Gradients of a batch are divided by their size: $B^{-1/2}$ where that of a prompt is about 1."""
        return batch**0.5

    def __str__(self) -> str:
        return f"adam:{self.beta1!r},{self.beta2!r},{self.epsilon!r}"


def _keep_share(optimiser: Any, name: str) -> None:
    value = float(checks.number(name, getattr(optimiser, name)))
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value:g}; it must be at least 0 and below 1")
    object.__setattr__(optimiser, name, value)


def optimiser_named(name: Any) -> AbstractOptimiser:
    """The optimiser that a command line or a file names: `sgd`, `momentum:0.9`, or `adam:0.9,0.999,1e-8`.

    Numbers left out have their defaults, which these are.
    """
    kinds = {"sgd": SGD, "momentum": Momentum, "adam": Adam}
    kind, _, text = name.partition(":") if isinstance(name, str) else ("", "", "")
    try:
        numbers = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        numbers = None
    if kind not in kinds or numbers is None or len(numbers) > len(dataclasses.fields(kinds[kind])):
        raise ValueError(
            f"optimiser is {name!r}; it must be sgd, momentum or momentum:BETA, adam or adam:BETA1,BETA2,EPSILON"
        )
    try:
        return kinds[kind](*numbers)
    except ValueError as error:
        raise ValueError(f"optimiser is {name!r}: {error}") from None
