"""TabPFN as a classifier: scikit-learn's interface, intervals, influential rows, and what it refuses."""

import numpy as np
import pytest
import torch
from scipy.special import expit

from drawn_tables import drawn_table, small_network
from largeprompt.models import TabPFNClassifier
from largeprompt.models.tables import read_table, study_rows

NAMES = np.array(["ash", "elm", "oak"])


@pytest.fixture(scope="module")
def classifier():
    table, labels, _ = drawn_table()
    return TabPFNClassifier(network=small_network()).fit(table, NAMES[labels])


@pytest.fixture(scope="module")
def rows():
    return drawn_table()[2]


def test_probabilities_are_the_softmax_of_the_prompts_logits(classifier, rows):
    prompt = classifier.weighted_prompt(rows)
    logits = prompt(torch.zeros(1, 60)).reshape(6, 3)
    found = classifier.predict_proba(rows)
    np.testing.assert_allclose(found, logits.softmax(dim=-1), atol=1e-12)
    np.testing.assert_array_equal(classifier.predict(rows), NAMES[found.argmax(axis=1)])
    assert classifier.score(rows, classifier.predict(rows)) == 1.0
    assert classifier.classes_.tolist() == NAMES.tolist()


def test_rows_are_predicted_independently_of_each_other(classifier, rows):
    np.testing.assert_allclose(classifier.predict_proba(rows[2:3]), classifier.predict_proba(rows)[2:3], atol=1e-12)


def test_parameters_are_those_of_the_constructor():
    classifier = TabPFNClassifier(5, seed=2)
    again = TabPFNClassifier(**classifier.get_params())
    assert again.get_params() == classifier.get_params()
    assert classifier.set_params(members=2).members == 2
    assert repr(classifier) == "TabPFNClassifier(members=2, seed=2)"
    with pytest.raises(ValueError, match="there is no parameter 'depth'; they are members, seed"):
        classifier.set_params(depth=2)


def test_the_conventions_of_scikit_learn_hold(classifier, rows):
    """The constructor keeps what it is given and checks nothing; `fit` changes no parameter and gives the object."""
    network = small_network()
    given = {"members": -1, "seed": 3, "device": "nowhere", "checkpoint": "absent", "fetch": True, "network": network}
    parameters = TabPFNClassifier(**given).get_params(deep=False)
    assert all(parameters[name] is value for name, value in given.items())
    assert not [name for name in vars(TabPFNClassifier()) if name.endswith("_")]
    clone = TabPFNClassifier(**classifier.get_params())  # as sklearn.base.clone makes one
    assert not clone.__sklearn_is_fitted__()
    before = clone.get_params()
    table, labels, _ = drawn_table()
    assert clone.fit(table, NAMES[labels]) is clone
    assert clone.get_params() == before
    assert clone.__sklearn_is_fitted__()
    assert (clone.n_features_in_, clone._estimator_type) == (7, "classifier")
    np.testing.assert_array_equal(clone.predict_proba(rows), classifier.predict_proba(rows))
    again = clone.fit(table[:, :4], labels > 0)  # a second fit forgets the first
    assert (again.n_features_in_, again.classes_.tolist()) == (4, [False, True])
    assert clone.set_params() is clone


def test_intervals_of_probabilities_are_those_of_log_odds(classifier, rows):
    found = classifier.predict_interval(rows, 0.8, draws=16)
    np.testing.assert_allclose(found.probabilities, classifier.predict_proba(rows), atol=1e-9)
    np.testing.assert_allclose(found.low.ravel(), expit(found.log_odds.low))
    assert (found.low < found.probabilities).all()
    assert (found.probabilities < found.high).all()
    data = found.to_dataset()
    assert dict(data.sizes) == {"row": 6, "class": 3}
    assert data.attrs == {"level": 0.8, "method": "partitions", "rows of the prompt": 60}
    assert "Intervals of 80 % over redraws of 60 rows, by partitions (6 rows)" in repr(found)


def test_influential_rows_change_the_log_odds_of_the_likeliest_class_most(classifier, rows):
    found = classifier.influential_rows(rows, 60)
    likely = classifier.predict_proba(rows).argmax(axis=1)
    assert found.classes == tuple(NAMES[likely])
    assert (np.diff(np.abs(found.change), axis=1) <= 0).all()
    prompt = classifier.weighted_prompt(rows, of="log-odds", chosen=list(enumerate(likely)))
    for i, row in ((0, 0), (2, 5), (5, 59)):
        step = torch.zeros(1, 60, dtype=torch.float64)
        step[0, found.rows[i, row]] = 1e-5
        difference = float((prompt(-step) - prompt(step))[0, i]) / 2e-5
        assert found.change[i, row] == pytest.approx(difference, rel=1e-3, abs=1e-6)
    assert classifier.influential_rows(rows, 3).rows.tolist() == found.rows[:, :3].tolist()


@pytest.mark.parametrize(
    ("table", "labels", "said"),
    [
        (np.ones((4, 101)), [0, 1, 0, 1], "X has 101 columns; TabPFN reads at most 100"),
        (np.ones((11, 2)), range(11), "y has 11 classes; TabPFN reads at most 10"),
        (np.ones((3, 2)), ["a"] * 3, "y has the one class np.str_\\('a'\\); there must be at least two"),
        (np.ones((3, 2)), [0, 1], r"y has shape \(2,\); it must be \(3,\)"),
        (np.ones((2, 2)), [0, np.nan], r"y\[1\] is not a number"),
        ([["a", 1.0], ["b", 2.0]], [0, 1], "X is no table of numbers .*give categories as codes"),
        (np.array([[1.0], [np.inf]]), [0, 1], r"X\[1, 0\] is inf; numbers are at most 3e38, or NaN"),
        (np.ones((2, 2)) * 1j, [0, 1], "X is no table of numbers .*complex"),
        (np.ones((2, 2)), ["a", None], "y has classes of the types NoneType, str; they must be of one"),
        (np.ones(3), [0, 1, 0], r"X has shape \(3,\); it must be \(rows, columns\)"),
    ],
)
def test_tables_that_it_cannot_read_are_refused_in_one_line(table, labels, said):
    with pytest.raises(ValueError, match=said) as error:
        TabPFNClassifier(network=small_network()).fit(table, labels)
    assert "\n" not in str(error.value)


def test_rows_of_another_table_are_refused(classifier, rows):
    with pytest.raises(ValueError, match="X has 6 columns; the labelled rows have 7"):
        classifier.predict(rows[:, 1:])
    with pytest.raises(ValueError, match="no labelled rows yet"):
        TabPFNClassifier().predict(rows)
    with pytest.raises(ValueError, match=r"pairs are \(row, class\), below \(6, 3\)"):
        classifier.weighted_prompt(rows, chosen=[(0, 3)])
    with pytest.raises(ValueError, match="of is 'odds'; it must be one of logits, log-odds"):
        classifier.weighted_prompt(rows, of="odds")
    with pytest.raises(ValueError, match=r"log-weights have shape \(60,\); they must be \(any, 60\)"):
        classifier.weighted_prompt(rows)(torch.zeros(60))
    with pytest.raises(ValueError, match=r"y has shape \(2,\); it must be \(6,\)"):
        classifier.score(rows, ["ash", "elm"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "nowhere"}, "device is 'nowhere', which PyTorch does not have here"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"members": 0}, "members is 0; it must be at least 1"),
    ],
)
def test_parameters_that_mean_nothing_are_refused_by_fit(options, said):
    table, labels, _ = drawn_table()
    with pytest.raises(ValueError, match=said):
        TabPFNClassifier(network=small_network(), **options).fit(table, labels)


def test_a_study_holds_out_rows_and_reports_on_each(tmp_path):
    values, labels, _ = drawn_table()
    lines = [f"{','.join(f'{x:g}' for x in row)},{NAMES[c]}" for row, c in zip(values, labels, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,c,d,e,f,g,tree", *lines]))
    table = read_table(tmp_path / "t.csv", "tree")
    classifier = TabPFNClassifier(2, network=small_network())
    study = study_rows(table, classifier, rows=40, held_out=5, draws=16)
    assert not set(study.labelled) & set(study.held_out)
    assert (len(study.labelled), len(study.held_out)) == (40, 5)
    direct = classifier.predict_proba(table.values[study.held_out])
    np.testing.assert_allclose(study.probabilities, direct, atol=1e-12)
    for i, row in enumerate(study.rows(3)):
        assert row["line"] == study.held_out[i] + 2
        assert row["probability"] == pytest.approx(direct[i].max(), abs=1e-9)
        assert row["low"] < row["probability"] < row["high"]
        assert len(row["influential"]) == 3
    loss = -np.mean(np.log(direct[np.arange(5), table.labels[study.held_out]]))
    assert study.curve.score[-1] == pytest.approx(loss, abs=1e-9)
    assert study.summary[0].startswith(f"From 40 labelled rows {study.right.sum()} of 5 held-out rows")
    with pytest.raises(ValueError, match="58 labelled rows and 5 held out of 60"):
        study_rows(table, classifier, rows=58, held_out=5)
