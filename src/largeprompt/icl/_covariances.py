import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from largeprompt import _checks as checks
from largeprompt._typing import Numbers, VectorLike


def identity(d: int) -> Float[Array, "d d"]:
    """Isotropic covariates."""
    return jnp.asarray(np.eye(checks.count("d", d)))


def kms(d: int, rho: float = 0.5) -> Float[Array, "d d"]:
    r"""The Kac-Murdock-Szegő matrix $\Sigma_{ij} = \rho^{|i-j|}$. Paper: Appendix A.2.2."""
    base = checks.number("rho", rho)
    if not checks.is_traced(base) and not -1 <= float(base) <= 1:
        raise ValueError(f"rho is {float(base):g}; it must lie between -1 and 1")
    i = np.arange(checks.count("d", d))
    return jnp.asarray(checks.library(base).asarray(base) ** np.abs(i[:, None] - i), base.dtype)


def diagonal(variances: Numbers) -> Float[Array, "d d"]:
    """Independent covariates of the variances given."""
    return jnp.diag(checks.scales("variances", variances))


def spiked(d: int, spike: float, direction: VectorLike | None = None) -> Float[Array, "d d"]:
    r"""$I + \text{spike}\; nn^\top$ with $n$ the unit vector along `direction`, by default the first axis."""
    d, size = checks.count("d", d), checks.number("spike", spike, at_least=-1)
    n = jnp.eye(d)[0] if direction is None else checks.vector("direction", direction, d)
    length = jnp.linalg.norm(n)
    if not checks.is_traced(length) and float(length) == 0:
        raise ValueError("direction is 0; it must point somewhere")
    n = n / length
    return jnp.eye(d) + size * jnp.outer(n, n)


def covariance_named(name: str, d: int) -> Float[Array, "d d"]:
    """The covariance that a command line or a file names: `identity`, `kms:0.5`, `diagonal:1,2,4` or `spiked:3`."""
    kind, _, argument = name.partition(":")
    try:
        numbers = [float(part) for part in argument.split(",")] if argument else []
    except ValueError:
        raise ValueError(f"the covariance {name!r} has {argument!r} after its colon; it must be numbers") from None
    if kind == "identity" and not numbers:
        return identity(d)
    if kind == "kms" and len(numbers) <= 1:
        return kms(d, *numbers)
    if kind == "diagonal" and len(numbers) == d:
        return diagonal(numbers)
    if kind == "spiked" and len(numbers) == 1:
        return spiked(d, numbers[0])
    raise ValueError(
        f"the covariance is {name!r}; for d = {d} it must be identity, kms:RHO, spiked:SIZE "
        f"or diagonal: and {d} numbers"
    )
