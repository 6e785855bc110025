"""Intervals of differences and verdicts of grid_statistics.py, against textbook values and other formulas."""
import math

import numpy as np
import pytest

import calls  # noqa: F401, puts scripts/ on the path
from lib import grid_statistics


# A textbook's table; 2.5 by scipy.stats.t.ppf(0.975, 2.5).
@pytest.mark.parametrize("freedom, expected", [(1, 12.706205), (2, 4.302653), (2.5, 3.574655), (4, 2.776445),
                                               (14, 2.144787), (30, 2.042272), (100, 1.983972)])
def test_quantiles_of_students_distribution(freedom, expected):
    assert grid_statistics.quantile(freedom) == pytest.approx(expected, abs=1e-6)


def test_the_residual_is_that_of_least_squares():
    numbers = np.random.default_rng(1).normal(size=(5, 4)) + np.arange(5)[:, None] + 10 * np.arange(4)
    rows, seeds = np.indices(numbers.shape).reshape(2, -1)
    design = np.hstack([np.eye(5)[rows], np.eye(4)[seeds]])
    fit = np.linalg.lstsq(design, numbers.ravel(), rcond=None)[0]
    squares, freedom = np.sum((numbers.ravel() - design @ fit) ** 2), 20 - np.linalg.matrix_rank(design)
    assert grid_statistics.residual(numbers.tolist()) == (pytest.approx(math.sqrt(squares / freedom)), freedom)


def test_what_is_pooled():
    """The rows and seeds with the most degrees of freedom; rows that diverged or have one seed are left out."""
    two = [{1: 1.0, 2: 2.0, 3: 3.5}, {1: 1.5, 2: 2.0, 3: 3.0}]
    others = [{1: 4.0}, {1: 1.0, 2: math.inf, 3: 1.0}]
    expected = grid_statistics.residual([[1.0, 2.0, 3.5], [1.5, 2.0, 3.0]])
    assert grid_statistics.pooled(two + others) == expected and expected[1] == 2
    six = [{1: x, 2: x * x} for x in (1.0, 2.0, 4.0, 5.0)]
    assert grid_statistics.pooled(two + six)[1] == 5, "six rows with two seeds"
    assert grid_statistics.pooled([*two[:1], *others]) is None


def test_two_rows_pooled_are_the_paired_test():
    a, b = [5.01, 5.20, 4.90], [5.00, 5.11, 4.86]
    pooled = grid_statistics.half_of_pooled(*grid_statistics.residual([a, b]), 3)
    differences = np.subtract(a, b)
    assert pooled == pytest.approx(4.302653 * np.std(differences, ddof=1) / math.sqrt(3))
    assert grid_statistics.half_of_paired(list(differences)) == pytest.approx(pooled)
    assert grid_statistics.half_of_pooled(0.01, 14, 1) == pytest.approx(2.144787 * 0.01 * math.sqrt(2))


def test_welch():
    """scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval() is -11.51638 to -4.21695, with 2.1199 degrees
    of freedom instead of the 4 of equal variances."""
    half = grid_statistics.half_of_welch([1.0, 2.0, 4.0], [10.0, 10.5, 10.1])
    assert half == pytest.approx((11.516379 - 4.216954) / 2, abs=1e-5)
    assert grid_statistics.half_of_welch([1.0, 2.0, 4.0], [7.0, 7.0, 7.0]) == pytest.approx(
        4.302653 * np.std([1, 2, 4], ddof=1) / math.sqrt(3))
    assert grid_statistics.half_of_welch([1.0, 1.0], [2.0, 2.0]) == 0
    assert math.isnan(grid_statistics.half_of_welch([1.0], [2.0, 3.0]))
    assert math.isnan(grid_statistics.half_of_paired([1.0]))


@pytest.mark.parametrize("difference, half, operator, verdict", [
    (-0.1, 0.09, "<", "agrees"), (-0.1, 0.09, ">", "disagrees"), (0.1, 0.09, "<", "disagrees"),
    (0.1, 0.09, ">", "agrees"), (0.1, 0.1, ">", "undecided"), (0.0, 0.0, "<", "undecided"),
    (0.1, math.nan, ">", "undecided: one seed"), (math.inf, math.inf, ">", "undecided"), (math.inf, 0, ">", "agrees"),
    (0.1, 0.05, "=", "agrees"), (-0.18, 0.03, "=", "undecided"), (-0.3, 0.05, "=", "disagrees"),
    (math.inf, 0, "=", "disagrees")])
def test_judgments(difference, half, operator, verdict):
    assert grid_statistics.judge(difference, half, operator, within=0.2) == verdict
