"""What a valid input is, said once: every public constructor and function asks here before anything is traced."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from largeprompt._typing import Numbers

Size = int | None
LONGEST = int(1e300)
_FEW = 2**16  # numbers that are judged and copied by NumPy


def is_traced(x: Any) -> bool:
    """Whether `x` has no value yet; then only its shape can be judged."""
    return isinstance(x, Tracer)


# Inside `jit` even a constant's arithmetic is traced, unless JAX is asked to evaluate it: values are judged under this.
_evaluated = jax.ensure_compile_time_eval


def array(name: str, x: Any, shape: tuple[Size, ...]) -> Array:
    """`x` as a finite real floating-point array of the given shape (`None` = any positive size)."""
    x = _as_array(name, x)
    if not any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise ValueError(f"{name} has entries of type {x.dtype}; they must be real numbers")
    if len(x.shape) != len(shape) or any(s is not None and s != n for n, s in zip(x.shape, shape, strict=True)):
        wanted = ", ".join("any" if s is None else str(s) for s in shape)
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be ({wanted})")
    if 0 in x.shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must not be empty")
    # sums over tokens in half precision overflow or stall; everything narrower than float32 is widened
    dtype = float if not jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32 if x.dtype.itemsize < 4 else None
    if is_traced(x):
        return jnp.asarray(x, dtype)
    with _evaluated():
        return finite(name, jnp.asarray(x, dtype) if isinstance(x, Array) else _of_numpy(x, dtype))


def _of_numpy(x: np.ndarray, dtype: Any) -> Array:
    if x.size > _FEW:
        return jnp.asarray(x, dtype)
    # jnp.asarray compiles a program for each shape; device_put may keep the caller's own memory, so it gets a copy
    return jax.device_put(np.array(x, dtype or x.dtype))


def _as_array(name: str, x: Any) -> Any:
    """`x` as a NumPy or JAX array of whatever type and shape."""
    if isinstance(x, Array):
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array; fill or drop its masked entries")
    try:
        x = np.asarray(x)
        if x.dtype == np.longdouble:
            return x.astype(np.float64)
        # NetCDF and FITS hold numbers in the order of bytes that JAX does not know
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))
    except (ValueError, TypeError) as error:
        try:
            return jnp.asarray(x)  # a list with traced entries
        except (ValueError, TypeError):
            raise ValueError(f"{name} is not an array: {str(error).splitlines()[0]}") from None


def _judged(x: Array) -> Any:
    """The values of `x`, by NumPy where they are few: JAX would compile each comparison for each shape."""
    return np.asarray(x) if x.size <= _FEW else x


def library(*trees: Any) -> Any:
    """NumPy where all values are known, else JAX: for a few numbers, that compiles nothing."""
    return jnp if any(map(is_traced, jax.tree.leaves(trees))) else np


def _first(wrong: Any) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(np.asarray(wrong))[0])


def finite(name: str, x: Array) -> Array:
    """`x` itself, once none of its entries is NaN or infinite."""
    if is_traced(x):
        return x
    with _evaluated():
        values = _judged(x)
        wrong = ~(np if isinstance(values, np.ndarray) else jnp).isfinite(values)
        if bool(wrong.any()):
            at = _first(wrong)
            place = f"[{', '.join(map(str, at))}]" if at else ""
            raise ValueError(f"{name}{place} is {float(x[at])}; every entry must be finite")
    return x


def result(name: str, x: Array) -> Array:
    """A computed number on its way out: never NaN, never silently infinite."""
    if is_traced(x):
        return x
    with _evaluated():
        values = _judged(x)
        if not bool((np if isinstance(values, np.ndarray) else jnp).isfinite(values).all()):
            raise ValueError(f"{name} overflows {x.dtype}; use a smaller tilt, smaller weights or a wider type")
    return x


def number(name: str, x: Any, *, at_least: float = -math.inf) -> Array:
    """`x` as a finite real scalar within its range."""
    x = array(name, x, ())
    if not is_traced(x) and float(x) < at_least:
        raise ValueError(f"{name} is {float(x):g}; it must be at least {at_least:g}")
    return x


def nonnegative(name: str, x: Array) -> Array:
    """The vector `x` itself, once none of its entries is negative."""
    if is_traced(x):
        return x
    with _evaluated():
        wrong = _judged(x) < 0
        if bool(wrong.any()):
            (at,) = _first(wrong)
            raise ValueError(f"{name}[{at}] is {float(x[at]):g}; every entry must be at least 0")
    return x


def count(name: str, n: Any, *, at_least: int = 1) -> int:
    """`n` as a whole number of at least `at_least`."""
    if isinstance(n, float | np.floating) and float(n).is_integer():
        n = int(n)
    try:
        whole = operator.index(n)
    except TypeError:
        whole = None
    if whole is None or isinstance(n, bool):
        raise ValueError(f"{name} is {n!r}; it must be a whole number of at least {at_least}")
    if whole < at_least:
        raise ValueError(f"{name} is {n}; it must be at least {at_least}")
    return whole


def key(k: Any) -> Any:
    """`k` itself, once it is a JAX key, of the new style or the old."""
    if not isinstance(k, Array) or not (jnp.issubdtype(k.dtype, jax.dtypes.prng_key) or k.dtype == jnp.uint32):
        raise ValueError(f"key is {k!r}; it must be a JAX key, such as jax.random.key(0)")
    return k


def key_or_default(k: Any) -> Any:
    """`k` itself, or without one `jax.random.key(0)`, so that the same call gives the same number."""
    if k is not None:
        return key(k)
    with _evaluated():
        return jax.random.key(0)


def prompt_length(L: Any, *, at_least: int = 1) -> int | float:
    """A prompt length: a whole number that a float64 can hold, of at least `at_least`, or `math.inf`."""
    if isinstance(L, float | np.floating) and math.inf == L:
        return math.inf
    try:
        length = count("L", L, at_least=at_least)
    except ValueError:
        raise ValueError(f"L is {L!r}; a prompt length is a whole number of at least {at_least}, or math.inf") from None
    if length > LONGEST:
        raise ValueError(f"L is about 1e{math.log10(length):.0f}; a prompt length is at most 1e300, or math.inf")
    return length


def real_length(L: Any, dtype: Any) -> Array:
    """A prompt length as a real number; where the type cannot hold it, infinite, so that 1/L is 0 as in rounding."""
    if isinstance(L, int | float):
        with np.errstate(over="ignore"):
            L = np.asarray(float(L)).astype(dtype)
    return jnp.asarray(L, dtype)


def covariance(name: str, x: Any, dim: Size = None) -> Array:
    """`x` as a symmetric positive semi-definite matrix, symmetrised to the last bit."""
    x = array(name, x, (dim, dim))
    if x.shape[0] != x.shape[1]:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be square")
    if is_traced(x):
        return (x + x.T) / 2
    C = np.asarray(x)
    eps, largest = float(np.finfo(C.dtype).eps), float(np.abs(C).max())
    slack, asymmetry = math.sqrt(eps) * largest, float(np.abs(C - C.T).max())
    if asymmetry > slack:
        raise ValueError(f"{name} is not symmetric: |{name} - {name}ᵀ| reaches {asymmetry:.3g}; it must be 0")
    C = (C + C.T) / 2
    values, vectors = np.linalg.eigh(C)
    if values[0] < -slack:
        raise ValueError(f"{name} has the eigenvalue {values[0]:.3g}; a covariance has none below 0")
    # what is negative beyond the rounding of a product is taken out, so that moments and samples agree
    wrong = values[0] < -10 * len(C) * eps * largest
    with _evaluated():
        return jnp.asarray((vectors * np.maximum(values, 0)) @ vectors.T if wrong else C)


def probabilities(name: str, w: Any, n: int) -> Array:
    """`w` as the logarithms of `n` probabilities, normalised to the last bit."""
    w = nonnegative(name, array(name, w, (n,)))
    if is_traced(w):
        return jnp.log(w) - jnp.log(w.sum())
    with _evaluated():
        values = _judged(w)
        total = float(values.sum())
        if abs(total - 1) > 10 * math.sqrt(float(jnp.finfo(w.dtype).eps)):
            raise ValueError(f"{name} sums to {total:.6g}; it must sum to 1")
        library = np if isinstance(values, np.ndarray) else jnp
        with np.errstate(divide="ignore"):
            return jnp.asarray(library.log(values) - library.log(values.sum()))


def vector(name: str, x: Numbers, dim: Size = None) -> Array:
    """`x` as a finite vector of dimension `dim`."""
    return array(name, x, (dim,))


def scales(name: str, x: Any) -> Array:
    """`x` as a vector of non-negative lengths, one a coordinate; a single number is one coordinate."""
    x = _as_array(name, x)
    return nonnegative(name, vector(name, x.reshape(1) if x.ndim == 0 else x))


def matrix(name: str, x: Numbers, rows: Size = None, columns: Size = None) -> Array:
    """`x` as a finite matrix of the given shape."""
    return array(name, x, (rows, columns))
