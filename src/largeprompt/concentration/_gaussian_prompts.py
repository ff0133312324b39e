r"""Gaussian prompts, drawn exactly in law through their sufficient statistics, one query for each prompt.

Tokens are $z = m + C\zeta$, $\zeta$ standard normal in $r$ dimensions. The score of a query $u = Uz_q$ is $\beta g$, $g
= e\cdot\zeta$ along $e = C^\top u/\beta$; a value $V_i\cdot z$ needs the direction $C^\top V_i$ too. In an orthonormal
basis E of these directions $h = E^\top\zeta$ is standard normal, and for coefficients $\kappa_l$ that depend on
$h_1,\dots,h_L$ only,
$$\sum_l\kappa_l\zeta_l = E\sum_l\kappa_lh_l + (I-EE^\top)\,\Xi\,(\kappa^\top\kappa)^{1/2},\qquad\Xi\ \text{normal}:$$
each token takes one normal for the output, whatever the dimension, and one more for each output row for its gradients.
Linear attention sees a Wishart matrix, whose cost does not grow with the length at all.
"""

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from largeprompt._device import DeviceName
from largeprompt.attention import AbstractAttention, kind_of
from largeprompt.measures import AbstractMeasure, Gaussian

from ._squares import QuadraticForm

_ROOM = 2**23  # numbers held at once
_MATRICES = 2**26  # numbers of the matrices that linear attention sees
_LONGEST = 2**32  # normals of one prompt that the compiled sums can count


class GaussianPrompts:
    """Prompts of one Gaussian law, read by one layer."""

    def __init__(self, attention: AbstractAttention, mu: Gaussian):
        self.U, self.V = np.asarray(attention.U, float), np.asarray(attention.V, float)
        self.linear = kind_of(attention) == "linear"
        self.m, Gamma = np.asarray(mu.m, float), np.asarray(mu.Gamma, float)
        values, vectors = np.linalg.eigh(Gamma)
        alive = values > 1e-14 * max(values.max(), 0.0)
        self.C = vectors[:, alive] * np.sqrt(values[alive])  # its columns are the law's own directions
        self.Gamma = self.C @ self.C.T

    @classmethod
    def of(cls, attention: AbstractAttention, mu: AbstractMeasure) -> "GaussianPrompts | None":
        """Where it applies: softmax or linear attention on a Gaussian law that is no point."""
        known = kind_of(attention) is not None
        return cls(attention, mu) if known and isinstance(mu, Gaussian) and np.any(np.asarray(mu.Gamma)) else None

    def serves(self, L: int, slopes: bool) -> bool:
        """Whether prompts of this length can be drawn so."""
        r = self.C.shape[1]
        return r < L if self.linear else L * (self._coordinates() if slopes else 1) <= _LONGEST

    def _coordinates(self) -> int:
        return min(1 + len(self.V), self.C.shape[1])

    def squares(
        self,
        forms: Sequence[QuadraticForm],
        queries: Float[np.ndarray, "b D"],
        L: int,
        seed: int,
        start: int,
        query_in_prompt: bool,
        device: DeviceName = "cpu",
    ) -> list[Float[np.ndarray, " b"]]:
        """The squared differences from the limit of each form, a fresh prompt for each query; `start` counts them."""
        slopes = any(form.slopes for form in forms)
        k = self._coordinates() if slopes else 1
        held = (len(self.V) + 2) * self.C.shape[1] + 2 * (1 + k) ** 2 + 4 * len(self.m)
        batch = max(64, _ROOM // held // 64 * 64)
        if self.linear:  # five matrices for each prompt
            batch = max(1, min(batch, _MATRICES // (5 * self.C.shape[0] ** 2)))
        parts = []
        draw = self._linear if self.linear else functools.partial(self._softmax, device=device)
        for i in range(0, len(queries), batch):
            z = queries[i : i + batch]
            with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused with its name
                dm, dHV = draw(z, L, seed, start + i, slopes, query_in_prompt)
                parts.append([_square(form, dm, dHV, z) for form in forms])
        return [np.concatenate(part) for part in zip(*parts, strict=True)]

    def _softmax(self, z, L: int, seed: int, start: int, slopes: bool, query_in_prompt: bool, device: DeviceName):
        from largeprompt.engine import gaussian_prompt_sums, sum_count  # which imports a compiler

        rng = np.random.default_rng([seed, L, start])
        u = z @ self.U.T
        along = u @ self.C
        beta = np.linalg.norm(along, axis=1)
        r, p = self.C.shape[1], len(self.V)
        images = self.V @ self.C  # rows C^T V_i
        whole = not slopes or 1 + p >= r
        if not slopes:
            E = (along / np.where(beta > 0, beta, 1.0)[:, None])[:, :, None]
            E[beta == 0, 0, 0] = 1.0
        elif whole:
            E = np.linalg.qr(along[:, :, None], mode="complete")[0]
        else:
            columns = np.concatenate([along[:, :, None], np.broadcast_to(images.T, (len(z), r, p))], axis=2)
            E = np.linalg.qr(columns)[0]
        E[:, :, 0] *= np.where(np.einsum("br,br->b", E[:, :, 0], along) < 0, -1.0, 1.0)[:, None]
        k = E.shape[2]
        n = sum_count(k, slopes)
        sums = gaussian_prompt_sums(beta, L, k, seed, products=slopes, start=start, device=device)
        first, second, shift = sums[:, :n], sums[:, n : 2 * n], sums[:, 2 * n]
        S0 = first[:, 0]
        h = first[:, 1 : 1 + k] / S0[:, None]
        R = np.einsum("brk,pr->bkp", E, images)
        # columns of coefficients: the weights themselves and, for slopes, weights times centred values
        q = second[:, 0] / S0**2
        if slopes:
            first_products, second_products = _symmetric(first[:, 1 + k :], k), _symmetric(second[:, 1 + k :], k)
            cov = first_products / S0[:, None, None] - h[:, :, None] * h[:, None, :]
            crossed = second[:, 1 : 1 + k] / S0[:, None] ** 2 - q[:, None] * h
            of_pairs = second_products / S0[:, None, None] ** 2 - h[:, :, None] * crossed[:, None, :]
            of_pairs -= crossed[:, :, None] * h[:, None, :] + q[:, None, None] * h[:, :, None] * h[:, None, :]
            inside = np.concatenate([h[:, :, None], cov @ R], axis=2)
            gram = np.empty((len(z), 1 + p, 1 + p))
            gram[:, 0, 0], gram[:, 1:, 1:] = q, R.transpose(0, 2, 1) @ of_pairs @ R
            gram[:, 0, 1:] = gram[:, 1:, 0] = np.einsum("bk,bkp->bp", crossed, R)
        else:
            inside, gram = h[:, :, None], q[:, None, None]
        zeta = E @ inside
        if k < r:
            normal = rng.normal(size=(len(z), r, gram.shape[1])) @ _roots(gram)
            zeta += normal - E @ (E.transpose(0, 2, 1) @ normal)
        limit = beta[:, None] * E[:, :, 0]
        dm = (zeta[:, :, 0] - limit) @ self.C.T
        dHV = self.C @ (zeta[:, :, 1:] - images.T) if slopes else None
        if query_in_prompt:
            share = _share(S0, beta * shift, np.sum(u * (z - self.m), axis=1))
            off = z - self.m - u @ self.Gamma - dm  # from the tokens' own mean
            if dHV is not None:
                HV = (1 - share)[:, None, None] * (dHV + self.Gamma @ self.V.T)
                HV += (share * (1 - share))[:, None, None] * off[:, :, None] * (off @ self.V.T)[:, None, :]
                dHV = HV - self.Gamma @ self.V.T
            dm = dm + share[:, None] * off
        return dm, dHV

    def _linear(self, z, L: int, seed: int, start: int, slopes: bool, query_in_prompt: bool):
        rng = np.random.default_rng([seed, L, start])
        b, r = len(z), self.C.shape[1]
        # Bartlett: the centred tokens' sum of squares is T T^T with chi entries on the diagonal of T
        T = np.tril(rng.normal(size=(b, r, r)), -1)
        T[:, np.arange(r), np.arange(r)] = np.sqrt(rng.chisquare(L - 1 - np.arange(r), size=(b, r)))
        mean = self.m + rng.normal(size=(b, r)) @ self.C.T / np.sqrt(L)
        root = self.C @ T
        second = root @ root.transpose(0, 2, 1) / L + mean[:, :, None] * mean[:, None, :]
        if query_in_prompt:
            second = (L * second + z[:, :, None] * z[:, None, :]) / (L + 1)
        dS = second - (self.Gamma + np.outer(self.m, self.m))
        return np.einsum("bij,bj->bi", dS, z @ self.U.T), dS @ self.V.T if slopes else None


def _square(form: QuadraticForm, dm, dHV, z) -> Float[np.ndarray, " b"]:
    total = np.einsum("bi,ij,bj->b", dm, np.asarray(form.M), dm)
    for _, B, N in form.slopes:  # A is VᵀV in every form of a head, and ΔH is symmetric
        total += np.einsum("bip,ij,bjp->b", dHV, np.asarray(B), dHV, optimize=True) * np.einsum(
            "bi,ij,bj->b", z, np.asarray(N), z
        )
    return total


def _symmetric(entries: Float[np.ndarray, "b n"], k: int) -> Float[np.ndarray, "b k k"]:
    """From the entries on and above the diagonal, row by row."""
    i, j = np.triu_indices(k)
    matrix = np.empty((len(entries), k, k))
    matrix[:, i, j] = matrix[:, j, i] = entries
    return matrix


def _roots(gram: Float[np.ndarray, "b n n"]) -> Float[np.ndarray, "b n n"]:
    """Symmetric square roots."""
    values, vectors = np.linalg.eigh(gram)
    return (vectors * np.sqrt(np.maximum(values, 0))[:, None, :]) @ vectors.transpose(0, 2, 1)


def _share(total, of_tokens, of_query) -> Float[np.ndarray, " b"]:
    """The query's weight among all, from Σω at its shift and the two scores in logarithms."""
    return 1 / (1 + np.exp(np.clip(np.log(total) + of_tokens - of_query, -700, 700)))
