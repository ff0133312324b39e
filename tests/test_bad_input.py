"""Every wrong input is a ValueError that names the value and what would be right, raised before tracing."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import largeprompt as lp
from catalogue import f
from largeprompt.concentration import bounds, deviation, predict, prompt_length_for

pytestmark = pytest.mark.usefixtures("as_a_stranger")

I2 = np.eye(2)
NAN = np.array([[1.0, np.nan]])
KEY = jax.random.key(0)
GAUSSIAN = lp.Gaussian(np.zeros(2), I2)
SOFTMAX = lp.SoftmaxAttention(I2, I2)
HEAD = lp.Head(I2, I2, I2)


CASES = {
    "points of one dimension": (lambda: lp.Empirical(np.ones(3)), "points has shape (3,); it must be (any, any)"),
    "an empty prompt": (lambda: lp.Empirical(np.ones((0, 3))), "points has shape (0, 3); it must not be empty"),
    "tokens without coordinates": (lambda: lp.Empirical(np.ones((3, 0))), "must not be empty"),
    "a NaN token": (lambda: lp.Empirical(NAN), "points[0, 1] is nan; every entry must be finite"),
    "an infinite token": (lambda: lp.Empirical([[1.0, -np.inf]]), "points[0, 1] is -inf"),
    "complex tokens": (lambda: lp.Empirical(np.ones((2, 2)) * 1j), "complex128; they must be real"),
    "words": (lambda: lp.Empirical(f([["a", "b"]])), "they must be real numbers"),
    "ragged tokens": (lambda: lp.Empirical([[1.0, 2.0], [3.0]]), "points is not an array"),
    "a negative weight": (lambda: lp.Empirical(I2, [1.5, -0.5]), "weights[1] is -0.5; every entry must be at least 0"),
    "weights of sum 2": (lambda: lp.Empirical(I2, [1.0, 1.0]), "weights sums to 2; it must sum to 1"),
    "too many weights": (lambda: lp.Empirical(I2, [0.5, 0.25, 0.25]), "weights has shape (3,); it must be (2)"),
    "a mean of the wrong size": (lambda: lp.Gaussian([0.0], I2), "cov has shape (2, 2); it must be (1, 1)"),
    "a covariance not square": (lambda: lp.Gaussian([0.0, 0.0], np.ones((2, 3))), "cov has shape (2, 3)"),
    "a covariance not symmetric": (lambda: lp.Gaussian([0.0, 0.0], [[1, 0.5], [0, 1]]), "cov is not symmetric"),
    "a covariance not PSD": (lambda: lp.Gaussian([0.0, 0.0], [[1, 2], [2, 1]]), "cov has the eigenvalue -1;"),
    "a NaN covariance": (lambda: lp.Gaussian([0.0, 0.0], [[1, np.nan], [np.nan, 1]]), "cov[0, 1] is nan"),
    "a NaN mean": (lambda: lp.Gaussian([np.nan, 0.0], I2), "mean[0] is nan"),
    "a mixture of two dimensions": (
        lambda: lp.Mixture([0.5, 0.5], [GAUSSIAN, lp.Sphere(1.0, 3)]),
        "components have dimensions [2, 3]",
    ),
    "a mixture of nothing": (lambda: lp.Mixture([], []), "components have dimensions []"),
    "a mixture of a number": (
        lambda: lp.Mixture([1.0], f([3.0])),
        "components[0] is of type float; it must be a measure",
    ),
    "mixture weights of sum 0.9": (lambda: lp.Mixture([0.5, 0.4], [GAUSSIAN, GAUSSIAN]), "weights sums to 0.9"),
    "a negative scale": (lambda: lp.Rademacher([1.0, -1.0]), "scale[1] is -1; every entry must be at least 0"),
    "a negative half width": (lambda: lp.Cube(-1.0), "half_width[0] is -1"),
    "a matrix of half widths": (lambda: lp.Cube(I2), "half_width has shape (2, 2); it must be (any)"),
    "a negative radius": (lambda: lp.Sphere(-1.0, 3), "radius is -1; it must be at least 0"),
    "an infinite radius": (lambda: lp.Sphere(np.inf, 3), "radius is inf"),
    "a sphere in no dimension": (lambda: lp.Sphere(1.0, 0), "dim is 0; it must be at least 1"),
    "a sphere in 2.5 dimensions": (lambda: lp.Sphere(1.0, f(2.5)), "dim is 2.5; it must be a whole number"),
    "an affine map of the wrong width": (
        lambda: lp.Affine(np.ones((3, 3)), np.ones(3), GAUSSIAN),
        "A has shape (3, 3); it must be (any, 2)",
    ),
    "an affine shift of the wrong size": (
        lambda: lp.Affine(I2, np.ones(3), GAUSSIAN),
        "b has shape (3,); it must be (2)",
    ),
    "an affine image of a number": (
        lambda: lp.Affine(I2, np.ones(2), f(1.0)),
        "mu is of type float; it must be a measure",
    ),
    "a product of nothing": (lambda: lp.Product(), "it needs at least one measure"),
    "a product with a number": (lambda: lp.Product(GAUSSIAN, f(2)), "factor 1 is of type int; it must be a measure"),
    "a cgf not zero at zero": (lambda: lp.FromCGF(lambda t: t @ t + 1, 2), "cgf(0) is 1;"),
    "a cgf NaN at zero": (lambda: lp.FromCGF(lambda t: jnp.log(jnp.sinh(t) / t).sum(), 2), "cgf(0) is nan"),
    "a cgf with values in a space": (lambda: lp.FromCGF(lambda t: 0 * t, 2), "cgf returns shape (2,)"),
    "a concave cgf": (lambda: lp.FromCGF(lambda t: -t @ t, 2), "the Hessian of cgf at 0 has the eigenvalue -2"),
    "a cgf without a sampler": (lambda: lp.FromCGF(lambda t: t @ t, 2).sample(KEY, 3), "this FromCGF has no sampler"),
    "a tilted cgf sampled": (
        lambda: lp.FromCGF(lambda t: t @ t, 2, GAUSSIAN.sample).tilt([1.0, 0.0]).sample(KEY, 3),
        "this FromCGF has no sampler",
    ),
    "a cgf without a sub-Gaussian constant": (
        lambda: lp.FromCGF(lambda t: t @ t, 2).subgaussian(),
        "give FromCGF subgaussian=σ",
    ),
    "a sampler of the wrong shape": (
        lambda: lp.FromSampler(lambda key, n: jnp.ones((n, 3)), 2, KEY, size=10),
        "what sample(key, n) returned has shape (10, 3); it must be (10, 2)",
    ),
    "a sampler of NaN": (
        lambda: lp.FromSampler(lambda key, n: jnp.full((n, 2), jnp.nan), 2, KEY, size=10),
        "what sample(key, n) returned[0, 0] is nan",
    ),
    "a tilt of the wrong size": (lambda: GAUSSIAN.tilt([1.0]), "theta has shape (1,); it must be (2)"),
    "a NaN tilt": (lambda: GAUSSIAN.cgf([np.nan, 0.0]), "theta[0] is nan"),
    "no samples": (lambda: GAUSSIAN.sample(KEY, 0), "n is 0; it must be at least 1"),
    "a prompt of length 0": (lambda: GAUSSIAN.prompt(KEY, 0), "L is 0; a prompt length is a whole number"),
    "a prompt of length -1": (lambda: GAUSSIAN.prompt(KEY, -1), "L is -1;"),
    "a prompt of length 1.5": (lambda: GAUSSIAN.prompt(KEY, 1.5), "L is 1.5;"),
    "a prompt of length NaN": (lambda: GAUSSIAN.prompt(KEY, np.nan), "L is nan;"),
    "a U not square": (lambda: lp.SoftmaxAttention(np.ones((2, 3)), I2), "U has shape (2, 3); it must be square"),
    "a V of the wrong width": (lambda: lp.LinearAttention(I2, np.ones((2, 3))), "V has shape (2, 3)"),
    "a NaN U": (lambda: lp.SoftmaxAttention([[np.nan, 0], [0, 1]], I2), "U[0, 0] is nan"),
    "a prompt that is an array": (
        lambda: SOFTMAX(f(I2), [0.0, 0.0]),
        "it must be a measure, such as Empirical",
    ),
    "a prompt of another dimension": (lambda: SOFTMAX(lp.Sphere(1.0, 3), [0.0, 0.0]), "mu has tokens of dimension 3"),
    "a query of another dimension": (lambda: SOFTMAX(GAUSSIAN, [0.0]), "z has shape (1,); it must be (2)"),
    "queries of another dimension": (lambda: SOFTMAX.map(GAUSSIAN, np.ones((4, 3))), "queries has shape (4, 3)"),
    "an infinite query": (lambda: SOFTMAX.jacobian(GAUSSIAN, [np.inf, 0.0]), "z[0] is inf"),
    "weights that overflow": (
        lambda: lp.SoftmaxAttention(1e200 * I2, 1e200 * I2)(GAUSSIAN, [1.0, 1.0]),
        "the output of attention overflows float64",
    ),
    "scores that overflow": (
        lambda: lp.SoftmaxAttention(1e300 * I2, I2)(lp.Empirical(1e200 * I2), [1e10, 1.0]),
        "the output of attention overflows float64",
    ),
    "a cgf that overflows": (lambda: GAUSSIAN.cgf([1e200, 0.0]), "cgf(theta) overflows float64"),
    "a mixture tilt that overflows": (
        lambda: lp.Mixture([1.0], [GAUSSIAN]).tilt([1e200, 0.0]),
        "the tilt of a mixture overflows",
    ),
    "a kind unknown": (lambda: lp.Head(I2, I2, I2, kind=f("cosine")), "kind is 'cosine'; it must be one of"),
    "keys and queries of two shapes": (
        lambda: lp.Head(I2, np.ones((3, 2)), I2),
        "Q has shape (3, 2); it must be (2, 2)",
    ),
    "an O of the wrong width": (
        lambda: lp.Head(I2, I2, I2, np.ones((1, 3))),
        "O has shape (1, 3); it must be (any, 2)",
    ),
    "a NaN score scale": (lambda: lp.Head(I2, I2, I2, scale=np.nan), "scale is nan"),
    "no heads": (lambda: lp.MultiHead([]), "there must be at least one"),
    "heads of two shapes": (
        lambda: lp.MultiHead([HEAD, lp.Head(np.eye(3), np.eye(3), np.eye(3))]),
        "dimensions [(2, 2), (3, 3)]",
    ),
    "heads that do not divide": (lambda: lp.MultiHead.pytorch_default(KEY, 5, 2), "dim is 5 and heads is 2"),
    "a query length of 0": (lambda: lp.with_query(GAUSSIAN, [0.0, 0.0], 0), "L is 0;"),
    "a query without a length": (lambda: lp.with_query(GAUSSIAN, [0.0, 0.0]), "only an Empirical has a length"),
    "a layer error on an exact law": (lambda: lp.output_stderr(SOFTMAX, f(GAUSSIAN), [0.0, 0.0]), "only a FromSampler"),
    "nothing to be relative to": (
        lambda: lp.relative_nonlinearity(lp.SoftmaxAttention(0 * I2, I2), GAUSSIAN, I2),
        "there is nothing to be relative to",
    ),
    "asymptotics of linear attention": (
        lambda: lp.attention.softmax_form(lp.LinearAttention(I2, I2)),
        "the layer is linear attention; this holds of softmax attention only",
    ),
    "bounds of many heads": (
        lambda: bounds.bound(lp.MultiHead([HEAD]), GAUSSIAN, None, 5),
        "the layer is of type MultiHead; it must be one head of softmax or linear attention",
    ),
    "an integer for a key": (
        lambda: GAUSSIAN.sample(f(0), 5),
        "key is 0; it must be a JAX key, such as jax.random.key(0)",
    ),
    "depth of a cube": (lambda: lp.depth([SOFTMAX], f(lp.Cube([1.0, 1.0]))), "mu is of type Cube; only Gaussians"),
    "a pushforward of two dimensions": (
        lambda: lp.pushforward(SOFTMAX, GAUSSIAN, lp.Gaussian(np.zeros(3), np.eye(3))),
        "nu has tokens of dimension 3; they must be of dimension 2",
    ),
    "a query into an array": (lambda: lp.with_query(f(I2), [0.0, 0.0]), "mu is of type ndarray; it must be a measure"),
    "the nonlinearity of an array": (lambda: lp.nonlinearity(f(I2), [0.0, 0.0]), "mu is of type ndarray"),
    "particles of an array": (lambda: lp.particles([SOFTMAX], f(I2), KEY, 3), "mu is of type ndarray"),
    "heads that are not": (
        lambda: lp.MultiHead(f([SOFTMAX])),
        "heads[0] is of type SoftmaxAttention; it must be a Head",
    ),
    "one head for heads": (lambda: lp.MultiHead(f(HEAD)), "heads is one Head; it must be a list of heads"),
    "one component for components": (lambda: lp.Mixture([1.0], f(GAUSSIAN)), "components is one Gaussian"),
    "a cgf that is a number": (lambda: lp.FromCGF(f(3), 2), "cgf is 3; it must be a function"),
    "a cgf of another dimension": (
        lambda: lp.FromCGF(lambda t: t @ jnp.ones(3), 2),
        "cgf fails on a vector of dimension 2",
    ),
    "a cgf written with numpy": (lambda: lp.FromCGF(lambda t: np.exp(t).sum() - 2, 2), "written with jax.numpy"),
    "a sampler that is a number": (lambda: lp.FromSampler(f(3), 2, KEY), "sample is 3; it must be a function"),
    "masked tokens": (lambda: lp.Empirical(np.ma.masked_less(I2, 1)), "points is a masked array"),
    "keys for tokens": (lambda: lp.Empirical(f(jax.random.split(KEY, 4).reshape(2, 2))), "they must be real numbers"),
    "ragged half widths": (lambda: lp.Cube(f([[1.0], [2.0, 3.0]])), "half_width is not an array"),
    "many queries at once": (lambda: SOFTMAX(GAUSSIAN, f(I2)), "it must be one query (for many, use map)"),
    "samples that overflow": (
        lambda: lp.Gaussian([0.0], [[1e300]]).tilt([1e10]).sample(KEY, 3),
        "a sample overflows float64",
    ),
    "a sub-Gaussian constant that overflows": (
        lambda: lp.Empirical([[1e200, 1e200], [-1e200, 1e200]]).subgaussian(),
        "the sub-Gaussian constant overflows float64",
    ),
    "deviations of one prompt": (
        lambda: deviation(SOFTMAX, GAUSSIAN, I2, 10, "output", KEY, replicates=1),
        "replicates is 1; it must be at least 2",
    ),
    "deviations over no length": (
        lambda: deviation(SOFTMAX, GAUSSIAN, None, [], "output", KEY),
        "Ls is empty; it must be prompt lengths, at least one",
    ),
    "deviations of the infinite prompt": (
        lambda: deviation(SOFTMAX, GAUSSIAN, None, [10, np.inf], "output", KEY),
        "Ls has inf; prompt lengths are finite whole numbers of at least 1",
    ),
    "deviations of a word": (lambda: deviation(SOFTMAX, GAUSSIAN, None, "10", "output", KEY), "Ls has '10'; prompt"),
    "deviations of prompts of no token": (lambda: predict(SOFTMAX, GAUSSIAN, None, [5, 0], "output"), "Ls has 0;"),
    "deviations of prompts that nobody draws": (
        lambda: deviation(SOFTMAX, GAUSSIAN, None, 10**30, "output", KEY),
        f"Ls has {10**30}; prompts of up to 2147483647 tokens are drawn, longer ones only predicted",
    ),
    "more prompts than can be held": (
        lambda: deviation(SOFTMAX, GAUSSIAN, None, 5, "output", KEY, replicates=10**20),
        f"replicates is {10**20} with 8 queries each; at most 134217728 in all are held",
    ),
    "half a query": (
        lambda: deviation(SOFTMAX, GAUSSIAN, None, 5, "output", KEY, queries=f(0.5)),
        "queries is 0.5; it must be a whole number of at least 1",
    ),
    "deviations of nothing": (lambda: deviation(SOFTMAX, GAUSSIAN, None, 5, [], KEY), "quantity is empty; it must be"),
    "deviations of a number": (lambda: deviation(SOFTMAX, GAUSSIAN, None, 5, f(3), KEY), "quantity is 3; it must be"),
    "deviations of a matrix that is not there": (
        lambda: deviation(SOFTMAX, GAUSSIAN, None, 5, "K", KEY),
        "quantity is 'K'; this layer has output, U, V, gradient",
    ),
    "risks beside outputs": (
        lambda: predict(SOFTMAX, GAUSSIAN, None, 5, ("output", "risk")),
        "risks are of a task, the others of a law of tokens",
    ),
    "deviations of no layer": (
        lambda: deviation(f(3), GAUSSIAN, None, 5, "output", KEY),
        "the layer is of type int; it must be an attention layer",
    ),
    "another sampler": (
        lambda: deviation(SOFTMAX, GAUSSIAN, None, 5, "output", KEY, sampler="fast"),
        "sampler is 'fast'; it must be 'auto' or 'tokens'",
    ),
    "deviations at queries of another dimension": (
        lambda: deviation(SOFTMAX, GAUSSIAN, np.ones((4, 3)), 5, "output", KEY),
        "nu has shape (4, 3); it must be (any, 2)",
    ),
    "predictions at a query of another dimension": (
        lambda: predict(SOFTMAX, GAUSSIAN, [1.0, 2.0, 3.0], 5, "output"),
        "nu has shape (1, 3); it must be (any, 2)",
    ),
    "predictions at a NaN query": (
        lambda: predict(SOFTMAX, GAUSSIAN, NAN, 5, "output"),
        "nu[0, 1] is nan; every entry must be finite",
    ),
    "ragged queries": (lambda: predict(SOFTMAX, GAUSSIAN, [[1.0, 2.0], [3.0]], 5, "output"), "nu is not an array"),
    "a word for queries": (lambda: predict(SOFTMAX, GAUSSIAN, f("ab"), 5, "output"), "nu has entries of type <U2"),
    "an error of 0": (lambda: prompt_length_for(0.0, SOFTMAX, GAUSSIAN), "epsilon is 0; it must be from 1e-150"),
    "a negative error": (lambda: prompt_length_for(-1.0, SOFTMAX, GAUSSIAN), "epsilon is -1; it must be from 1e-150"),
    "a NaN error": (lambda: prompt_length_for(np.nan, SOFTMAX, GAUSSIAN), "epsilon is nan; every entry must be finite"),
    "an error whose square is no number": (lambda: prompt_length_for(1e300, SOFTMAX, GAUSSIAN), "epsilon is 1e+300;"),
    "a length for two quantities": (
        lambda: prompt_length_for(0.1, SOFTMAX, GAUSSIAN, None, f(["output", "U"])),
        "quantity is ['output', 'U']; a length is of one quantity, such as 'output'",
    ),
    "a length that could only be measured": (
        lambda: prompt_length_for(0.1, SOFTMAX, GAUSSIAN, None, "U", replicates=0),
        "replicates is 0; where no law of 1/L is known to hold the length for U is measured, which takes at least 2",
    ),
}


@pytest.mark.parametrize(("call", "message"), list(CASES.values()), ids=list(CASES))
def test_wrong_input_is_named(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_shapes_are_judged_under_tracing_too():
    with pytest.raises(ValueError, match=r"theta has shape \(3,\)"):
        jax.jit(lambda theta: GAUSSIAN.cgf(theta))(jnp.ones(3))
    with pytest.raises(ValueError, match="cov has shape"):
        jax.jit(lambda C: lp.Gaussian(jnp.zeros(2), C).cov())(jnp.ones((2, 3)))


def test_good_input_of_every_type_is_taken():
    expected = np.asarray(GAUSSIAN.cgf(np.array([1.0, 2.0])))
    for n in (3, 3.0, np.int64(3), np.array(3), jnp.int32(3)):
        assert GAUSSIAN.sample(KEY, f(n)).shape == (3, 2)
    assert GAUSSIAN.sample(jax.random.PRNGKey(0), 3).shape == (3, 2)
    slope = jax.grad(lambda a: lp.Gaussian([a, 0.0], I2).cgf([1.0, 2.0]))(0.5)
    assert float(slope) == 1.0
    for theta in ([1, 2], (1.0, 2.0), np.array([1, 2]), np.array([1, 2], np.float32), jnp.array([1, 2])):
        np.testing.assert_allclose(GAUSSIAN.cgf(theta), expected)


@pytest.mark.parametrize("kind", [">f8", "<f8", ">f4", ">i4", np.longdouble])
def test_numbers_of_any_type_and_order_of_bytes_are_read(kind):
    tokens = np.array([[1.0, 2.0], [3.0, 5.0]], kind)
    np.testing.assert_array_equal(lp.Empirical(tokens).points, [[1.0, 2.0], [3.0, 5.0]])


@pytest.mark.parametrize("tokens", [2, 2**16])
def test_a_prompt_keeps_its_tokens_when_the_array_they_were_read_from_changes(tokens):
    array = np.ones((tokens, 2))
    prompt = lp.Empirical(array)
    array[:] = 7.0
    assert float(jnp.max(prompt.points)) == 1.0
