"""Intervals of differences between rows of a grid, and verdicts on claims. doc/grids.md states the rule."""
import functools
import math
import statistics

LEVEL = 0.95


@functools.cache
def quantile(freedom):
    """The t with which a share LEVEL of Student's distribution lies between -t and t.

    With t = sqrt(freedom) tan(x), the share up to t is a constant times the integral of cos(x)^(freedom - 1) from 0 to
    x, here by Simpson's rule. The t is found by bisection."""
    constant = 2 * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)

    def share(end, steps=200):
        values = [math.cos(end * i / steps) ** (freedom - 1) for i in range(steps + 1)]
        inner = 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])
        return constant * (values[0] + inner + values[-1]) * end / steps / 3
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < LEVEL else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def residual(table):
    """(standard deviation, degrees of freedom) of what remains of the numbers in a table of rows x seeds without the
    mean of each row and the effect of each seed."""
    seeds = list(zip(*table))
    whole = statistics.fmean(map(statistics.fmean, table))
    effects = [statistics.fmean(seed) - whole for seed in seeds]
    squares = sum((x - statistics.fmean(row) - effect) ** 2 for row in table for x, effect in zip(row, effects))
    freedom = (len(table) - 1) * (len(seeds) - 1)
    return math.sqrt(squares / freedom), freedom


def pooled(rows):
    """The residual of the rows that share seeds, {seed: number} each: of those with the most degrees of freedom. None
    if no two rows share two seeds."""
    rows = [row for row in rows if all(map(math.isfinite, row.values()))]
    tables = [[[row[seed] for seed in seeds] for row in rows if seeds <= row.keys()]
              for seeds in {frozenset(row) for row in rows if len(row) > 1}]
    return max((residual(table) for table in tables if len(table) > 1), key=lambda found: found[1], default=None)


def half_of_paired(differences):
    """Half of the interval of the mean of some differences; NaN for fewer than two."""
    n = len(differences)
    return quantile(n - 1) * statistics.stdev(differences) / math.sqrt(n) if n > 1 else math.nan


def half_of_pooled(deviation, freedom, seeds):
    """Half of the interval of the difference between two rows, from the pooled residual."""
    return quantile(freedom) * deviation * math.sqrt(2 / seeds)


def half_of_welch(a, b):
    """Half of Welch's interval of the difference between two means; NaN if a side has fewer than two numbers."""
    if min(len(a), len(b)) < 2:
        return math.nan
    parts = [(statistics.variance(x) / len(x), len(x) - 1) for x in (a, b)]
    variance = sum(of for of, _ in parts)
    if variance == 0:
        return 0.0
    return quantile(variance ** 2 / sum(of ** 2 / freedom for of, freedom in parts)) * math.sqrt(variance)


def judge(difference, half, operator, within=0.0):
    """The verdict on a difference, left - right, plus or minus half of its interval, which a paper says is below, above
    or equal to 0."""
    if math.isnan(half):
        return "undecided: one seed"
    if math.isinf(half):
        return "undecided"      # only some of the seeds diverged
    if operator == "=":
        if abs(difference) + half <= within:
            return "agrees"
        return "disagrees" if abs(difference) - half > within else "undecided"
    if abs(difference) <= half:
        return "undecided"
    return "agrees" if (difference < 0) == (operator == "<") else "disagrees"
