"""How sure a number is: intervals of medians, and a test of two samples of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
LEAST_VALUES = 4  # with an interval; that of fewer would be their whole range


@dataclass(frozen=True)
class Estimate:
    """A median with its 95% interval; that of few values has none."""

    median: float
    low: float | None
    high: float | None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval has two ends or none")
        if self.low is not None and not self.low <= self.median <= self.high:
            raise ValueError("the median lies outside of its interval")


def median_interval(values: Sequence[float], seed: int) -> Estimate:
    """The median of at least one value, with a bootstrap interval from four on.

    The percentile bootstrap (Efron, 1979): medians of resamples of the same size,
    drawn with replacement. It never leaves the values' range, which holds the true
    median with probability 1 - 2 ** (1 - n): five values or fewer claim too much.
    """
    values = np.asarray(values, dtype=np.float64)
    median = float(np.median(values))
    if len(values) < LEAST_VALUES:
        return Estimate(median, None, None)
    drawn = np.random.default_rng(seed).choice(values, (RESAMPLES, len(values)))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.median(drawn, axis=1), (tail, 1 - tail))
    return Estimate(median, min(float(low), median), max(float(high), median))


def same_distribution(first: Sequence[int], second: Sequence[int], seed: int) -> float:
    """The p-value of two samples of tokens coming from one distribution.

    A permutation test of Pearson's statistic of homogeneity, so rare tokens need no
    joining: with both samples' tokens shuffled together, a token's share in the first
    is multivariate hypergeometric.
    """
    _, token = np.unique(np.concatenate((first, second)), return_inverse=True)
    pooled = np.bincount(token)
    observed = np.bincount(token[: len(first)], minlength=len(pooled))
    shuffled = np.random.default_rng(seed).multivariate_hypergeometric(
        pooled, len(first), RESAMPLES - 1, method="marginals"
    )
    share = len(first) / len(token)
    scale = 1 / (pooled * share) + 1 / (pooled * (1 - share))

    def statistic(counts: np.ndarray) -> np.ndarray:
        return ((counts - pooled * share) ** 2 * scale).sum(axis=-1)

    least = statistic(observed) * (1 - 1e-12)  # equal counts may sum differently
    return float(1 + (statistic(shuffled) >= least).sum()) / RESAMPLES
