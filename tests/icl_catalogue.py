"""Random tasks and layers of in-context regression, and prompts of them simulated in NumPy alone."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.special import gammaln, ive, softmax

import largeprompt as lp
from catalogue import covariance, matrix
from largeprompt.icl import LinearRegression, identity, kms


def square_root(cov) -> np.ndarray:
    """The symmetric root, by an eigendecomposition of our own."""
    values, vectors = np.linalg.eigh(np.asarray(cov))
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def mild(seed: int, d: int = 2) -> np.ndarray:
    """A covariance away from singular."""
    return (covariance(seed, d) + np.eye(d)) / 2


FLAT, KMS = LinearRegression.experiment(identity(5)), LinearRegression.experiment(kms(5))  # the paper's experiments
TASKS: dict[str, LinearRegression] = {
    "plain": LinearRegression(np.eye(2)),
    "anisotropic": LinearRegression(kms(2, 0.6), 0.3, mild(1)),
    "two targets": LinearRegression(kms(2, -0.5), 0.2, mild(2), targets=2),
    "other queries": LinearRegression(kms(2, 0.5), 0.1, mild(3), query_Sigma=mild(4)),
    "two targets, other queries": LinearRegression(mild(5), 0.4, query_Sigma=kms(2), targets=2),
    "singular": LinearRegression(np.diag([1.5, 0.0]), 0.2, np.ones((2, 2)), query_Sigma=np.eye(2)),
}


def weights(seed: int, task: LinearRegression, size: float = 0.4, outputs: int | None = None):
    """U and V with every block in use."""
    U, V = matrix(seed, task.dim, task.dim), matrix(seed + 1, outputs or task.targets, task.dim)
    return size * U, size * V


class Simulated(NamedTuple):
    """Prompts, queries, targets and coefficients of a regression."""

    tokens: np.ndarray
    queries: np.ndarray
    targets: np.ndarray
    W: np.ndarray


def simulated(task: LinearRegression, L: int, n: int, seed: int = 0, chunk: int = 2**21) -> Iterator[Simulated]:
    """In pieces that fit in memory."""
    rng, d, k = np.random.default_rng(seed), task.d, task.targets
    Sigma, Omega, S = (square_root(m) for m in (task.Sigma, task.Omega, task.query_Sigma))
    s = np.sqrt(float(task.noise))
    piece = max(1, min(n, chunk // (L * task.dim)))
    for start in range(0, n, piece):
        b = min(piece, n - start)
        W = rng.normal(size=(b, k, d)) @ Omega
        X = rng.normal(size=(b, L, d)) @ Sigma
        Y = X @ W.transpose(0, 2, 1) + s * rng.normal(size=(b, L, k))
        x = rng.normal(size=(b, d)) @ S
        y = np.einsum("bkd,bd->bk", W, x) + s * rng.normal(size=(b, k))
        yield Simulated(np.concatenate([X, Y], axis=2), np.concatenate([x, np.zeros((b, k))], axis=1), y, W)


def attend(kind: type, U, V, tokens: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The textbook layers on a batch of prompts."""
    scores = np.einsum("bld,bd->bl", tokens, queries @ np.asarray(U).T)
    shares = softmax(scores, axis=1) if kind is lp.SoftmaxAttention else scores / tokens.shape[1]
    return np.einsum("bl,bld->bd", shares, tokens) @ np.asarray(V).T


def zero_risk(task: LinearRegression) -> float:
    """The risk of predicting 0."""
    total = np.sum(np.asarray(task.query_Sigma) * np.asarray(task.Omega)) + float(task.noise)
    return task.targets * float(total) / 2


def excess(kind: type, U, V, task: LinearRegression, L: int, n: int, *, seed: int = 0, inside: bool = False):
    """Losses of a layer on `n` simulated prompts less those of predicting 0, whose mean is known: less noise.

    With `inside`, the query is the last token of the prompt.
    """
    found = []
    for batch in simulated(task, L, n, seed):
        tokens = np.concatenate([batch.tokens, batch.queries[:, None]], axis=1) if inside else batch.tokens
        output = attend(kind, U, V, tokens, batch.queries)[:, -task.targets :]
        found.append(np.sum(output * (output - 2 * batch.targets), axis=1) / 2)
    return np.concatenate(found)


def limit_excess(U, V, task: LinearRegression, n: int, *, seed: int = 0) -> np.ndarray:
    """The same at L = inf, where both layers predict V Γ_W U z."""
    found = []
    for batch in simulated(task, 1, n, seed):
        gammas = token_covariance(task, batch.W)
        output = np.einsum("pi,bij,bj->bp", np.asarray(V), gammas, batch.queries @ np.asarray(U).T)
        found.append(np.sum(output * (output - 2 * batch.targets), axis=1) / 2)
    return np.concatenate(found)


def token_covariance(task: LinearRegression, W: np.ndarray) -> np.ndarray:
    """CCᵀ with C the factor that makes (x, y) of standard normals; for one W or many."""
    d, k = task.d, task.targets
    C = np.zeros((*W.shape[:-2], d + k, d + k))
    C[..., :d, :d] = square_root(task.Sigma)
    C[..., d:, :d] = W @ C[..., :d, :d]
    C[..., d:, d:] = np.sqrt(float(task.noise)) * np.eye(k)
    return C @ C.swapaxes(-1, -2)


def aligned(A, r, task) -> tuple[np.ndarray, np.ndarray]:
    """U and V of a layer with P = C = 0."""
    d, k = task.d, task.targets
    U, V = np.zeros((d + k, d + k)), np.zeros((k, d + k))
    U[:d, :d], V[:, d:] = A, r
    return U, V


def sphere_rate(d: int, kappa: float, r: float, tau: float, noise: float) -> float:
    """The 1/L constant of softmax attention with A = κ/ρ² I and R = r on a sphere of radius ρ, for E(w·x)² = τ."""
    A1, A2 = (ive(d / 2, k) / ive(d / 2 - 1, k) for k in (kappa, 2 * kappa))

    def cgf(k):
        return gammaln(d / 2) + (d / 2 - 1) * math.log(2 / k) + math.log(ive(d / 2 - 1, k)) + k

    growth = math.exp(cgf(2 * kappa) - 2 * cgf(kappa))
    variance = tau * (1 - A2**2 + (A2 - A1) ** 2) + noise
    return growth * (r**2 * variance / 2 - r * (r * A1 - 1) * tau * (A2 - A1))
