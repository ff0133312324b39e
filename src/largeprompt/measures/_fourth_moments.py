r"""Fourth moments $E\,(y^\top Ay)(y^\top By)$, contracted: the tensor of $D^4$ numbers is never formed.

Here $y = z-\mathrm{mean}(\mu)+b$, and A and B are symmetric.
"""

import jax
import jax.numpy as jnp

_AT_ONCE = 8  # directions of a second derivative


def of_second_cumulants(C, b, A, B):
    """What mean and covariance give: all of it for a Gaussian."""
    AC, BC, bAb, bBb = jnp.sum(A * C), jnp.sum(B * C), b @ A @ b, b @ B @ b
    return AC * BC + 2 * jnp.sum((C @ A) * (B @ C)) + 4 * b @ A @ C @ B @ b + AC * bBb + BC * bAb + bAb * bBb


def of_cumulants(cov_of_tilt, C, b, A, B):
    r"""From $s\mapsto\mathrm{cov}(\mu_s)$: its derivatives at 0 are the third and fourth cumulants.

    Both are needed along a few directions only: $\sum_{ij}B_{ij}\partial_i\partial_j = \sum_k\beta_k\partial_{v_k}^2$
    with the eigenvectors of B.
    """

    def along(W, v):
        return lambda t: jnp.sum(W * cov_of_tilt(t * v))

    def slope(f):
        return lambda t: jax.jvp(f, (t,), (jnp.ones_like(t),))[1]

    zero = jnp.zeros((), b.dtype)
    third = 2 * slope(along(A, B @ b))(zero) + 2 * slope(along(B, A @ b))(zero)
    values, vectors = jnp.linalg.eigh((B + B.T) / 2)
    curvatures = jax.lax.map(lambda v: slope(slope(along(A, v)))(zero), vectors.T, batch_size=_AT_ONCE)
    return of_second_cumulants(C, b, A, B) + third + values @ curvatures
