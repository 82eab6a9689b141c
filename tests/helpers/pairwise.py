"""Few cases instead of a cross product, for factors that do not depend on each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases, one value of each axis, in which every two values of different axes meet at least once."""
    numbers = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = {pair for case in numbers for pair in _pairs(case)}
    chosen = []
    while missing:
        case = max(numbers, key=lambda case: len(missing.intersection(_pairs(case))))
        missing.difference_update(_pairs(case))
        chosen.append(tuple(axis[i] for axis, i in zip(axes, case, strict=True)))
    return chosen


def _pairs(case: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(itertools.combinations(enumerate(case), 2))
