"""What `largeprompt concentration` and `largeprompt prompt-length` refuse, in one line."""

from pathlib import Path

import pytest

SMALL = ("--d", "2", "--L", "4,16", "--replicates", "40", "--layer", "identity:0.3")
WRONG = [
    (
        ("--layer", "identity:0.3", "--score-scale", "0.5"),
        "--score-scale is '0.5'; identity:SCALE holds the scale already",
    ),
    (("--score-scale", "1/sqrt(-1)"), "--score-scale is '1/sqrt(-1)'; it must be a number, such as 0.25 or 1/sqrt(16)"),
    (
        ("--measure", "cauchy"),
        "--measure is 'cauchy'; it must be one of gaussian, rademacher, cube, sphere, regression",
    ),
    (("--sigma", "toeplitz"), "measure.cov: the covariance is 'toeplitz'; for d = 5"),
    (("--sigma", "missing.npz"), "missing.npz"),
    (("--d", "0"), "measure.dim is 0; it must be at least 1"),
    (("--d", "two"), "measure.dim is 'two'; it must be a whole number"),
    (("--noise", "0.1"), "--noise is '0.1'; tokens of kind 'gaussian' have no labels"),
    (("--measure", "regression", "--noise", "-1"), "measure.noise is -1; it must be a number of at least 0"),
    (
        ("--measure", "regression", "--quantity", "output"),
        "quantity has 'output'; of a regression it must be among risk",
    ),
    (("--quantity", "loss"), "quantity has 'loss'; of a law of tokens it must be among output, V, U"),
    (("--quantity", "risk"), "quantity has 'risk'; of a law of tokens"),
    (("--quantity", "O", "--layer", "identity:1"), "quantity is 'O'; this layer has"),
    (("--quantity", ""), "quantity has ''; of a law of tokens"),
    (("--query-sigma", "kms:2"), "query.cov: rho is 2; it must lie between -1 and 1"),
    (
        ("--layer", "xavier"),
        "--layer is 'xavier'; it must be pytorch, pytorch:SEED, identity:SCALE, FILE.npz or FILE.npy",
    ),
    (("--layer", "identity"), "--layer is 'identity'; it must be"),
    (("--layer", "identity:big"), "layer.scale is 'big'; it must be a finite number"),
    (("--layer", "pytorch:-1"), "layer.seed is -1; it must be at least 0"),
    (("--layer", "missing.npz"), "missing.npz"),
    (("--attention", "cosine"), "layer.kind is 'cosine'; it must be one of "),
    (("--L", "100:10:log"), "L is '100:10:log'; it must be such as"),
    (("--L", "inf"), "L has 'inf'; prompt lengths are whole numbers"),
    (("--replicates", "1"), "replicates is 1; it must be at least 2"),
    (("--replicates", "many"), "replicates is 'many'; it must be a whole number"),
    (("--seed", "-1"), "seed is -1; it must be at least 0"),
    (("--seed", str(2**32)), "seed is 4294967296; it must be below 2**32"),
    (("--d", "1000000"), "measure.dim is 1000000; it must be at most 10000"),
    (("--replicates", "1e12"), "replicates is 1000000000000; it must be at most 10000000"),
    (("--config", "missing.toml"), "missing.toml"),
    (("--device", "tpu"), "device is 'tpu'; it must be one of 'auto', 'cpu', 'gpu'"),
    ((*SMALL, "--out", "/dev/null/here"), "/dev/null"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_what_a_user_did_wrong_is_one_line(command, options, message):
    code, out, err = command("concentration", *options)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


WRONG_FILES = [
    ("lenghts = [10]", "lenghts = [10] is not a setting; they are measure, query, layer, L, quantity"),
    ("bounds = 1", "bounds is 1; it must be true or false"),
    ("measure = 3", "measure is 3; it must be a table"),
    ("layer = 3", "layer is 3; it must be a table"),
    ("quantity = 3", "quantity is 3; it must be names such as output,gradient"),
    ('[query]\nkind = "sphere"\nradius = 1\ndim = 3', "query has tokens of dimension 3; they must be of dimension 5"),
    ('[measure]\nkind = "regression"\nd = 2\n[query]\nkind = "cube"', "a regression has its own"),
    ("L = = 3", "study.toml is not TOML"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES, ids=[message[:40] for _, message in WRONG_FILES])
def test_what_is_wrong_with_a_file_is_one_line(command, text, message):
    Path("study.toml").write_text(text + "\n")
    code, _, err = command("concentration", "--config", "study.toml")
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_an_option_that_the_law_of_a_file_cannot_take_is_refused(command):
    Path("study.toml").write_text('[measure]\nkind = "empirical"\ntokens = [[1, 0], [0, 1]]\n')
    code, _, err = command("concentration", "--config", "study.toml", "--sigma", "kms:0.5")
    assert (code, err) == (2, "largeprompt: --sigma is 'kms:0.5'; a law of kind 'empirical' takes none\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--epsilon", "0"), "--epsilon is '0'; it must be a positive number"),
        (("--epsilon", "nan"), "--epsilon is 'nan'; it must be a positive number"),
        (("--epsilon", "inf"), "--epsilon is 'inf'; it must be a positive number"),
        (("--epsilon", "small"), "--epsilon is 'small'; it must be a positive number"),
        (
            ("--epsilon", "1", "--quantity", "output,gradient"),
            "quantity is output, gradient; a prompt length is of one",
        ),
        (("--epsilon", "1", "--quantity", "U,V"), "quantity is U, V; a prompt length is of one, give --quantity"),
        (("--epsilon", "1", "--layer", "xavier"), "--layer is 'xavier'"),
        (("--epsilon", "1", "--device", "tpu"), "device is 'tpu'"),
    ],
)
def test_what_a_prompt_length_cannot_be_asked_for_is_one_line(command, options, message):
    code, out, err = command("prompt-length", *options)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
