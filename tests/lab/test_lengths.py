"""Prompt lengths as a user writes them."""

import pytest

from largeprompt import lab
from refusals import refusal


@pytest.mark.parametrize(
    ("value", "lengths"),
    [
        ("10:100000:log", (10, 32, 100, 316, 1000, 3162, 10000, 31623, 100000)),
        ("10:1000:log:5", (10, 32, 100, 316, 1000)),
        ("1:5:log", (1, 2, 3, 4, 5)),
        ("10:40:10", (10, 20, 30, 40)),
        ("10:45:10", (10, 20, 30, 40)),
        ("10, 100,1e3", (10, 100, 1000)),
        ([3, 4.0], (3, 4)),
        (7, (7,)),
        ("7", (7,)),
    ],
)
def test_lengths_are_listed_stepped_or_log_spaced(value, lengths):
    assert lab.lengths_from(value) == lengths


WRONG_LENGTHS = [
    ("ten", "L has 'ten'; prompt lengths are whole numbers of at least 1"),
    ("", "L has ''; prompt lengths are whole numbers"),
    ("inf", "L has 'inf'"),
    ("10,0", "L has '0' in '10,0'"),
    ([1.5], "L has 1.5 in [1.5]"),
    ([True], "L has True in [True]"),
    ([], "L is [], 0 lengths; there must be 1 to 1000 of them"),
    (None, "L has None"),
    (2**31, "L has 2147483648; prompt lengths are whole numbers of at least 1, below 2**31"),
    ([10, 10], "L has 10 before 10; prompt lengths must increase"),
    ("100,10", "L has 100 before 10; prompt lengths must increase"),
    ("100:10:log", "L is '100:10:log'; it must be such as 10,100,1000"),
    ("10:100", "L is '10:100'; it must be such as 10,100,1000"),
    ("1:2:3:4", "L is '1:2:3:4'; it must be such as"),
    ("1:9:log:2:3", "L is '1:9:log:2:3'; it must be such as"),
    ("10:100:lin", "L has 'lin' in '10:100:lin'"),
    ("10:100:0", "L has '0' in '10:100:0'"),
    ("10:100:log:1", "L is '10:100:log:1'; of log-spaced lengths there must be 2 to 1000"),
    ("1:1000000:1", "L is '1:1000000:1', 1000000 lengths; there must be 1 to 1000 of them"),
]


@pytest.mark.parametrize(("value", "message"), WRONG_LENGTHS, ids=[message[:40] for _, message in WRONG_LENGTHS])
def test_wrong_lengths_are_named(value, message):
    assert message in refusal(lab.lengths_from, value)
