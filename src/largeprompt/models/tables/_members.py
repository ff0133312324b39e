"""The members of TabPFN's ensemble: the same table, seen in several ways."""

import itertools
import random
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Member:
    """One way to see a table: classes and columns rotated by so many places, with the power transform or without."""

    class_shift: int
    column_shift: int
    power: bool


def members_of(columns: int, classes: int, count: int, seed: int) -> list[Member]:
    """The first `count` members in the published order; there are at most 2 · columns · classes of them."""
    generator = torch.Generator().manual_seed(seed)
    column_shifts = torch.randperm(columns, generator=generator).tolist()
    class_shifts = torch.randperm(classes, generator=generator).tolist()
    shifts = list(itertools.product(class_shifts, column_shifts))
    random.Random(seed).shuffle(shifts)
    chosen = itertools.product(shifts, (False, True))
    return [Member(*shift, power) for shift, power in itertools.islice(chosen, count)]
