"""Intervals and tests against values computed in other ways."""

import math

import numpy as np
import pytest

from mlx_dflash2.bench.estimates import Estimate, median_interval, same_distribution


@pytest.mark.parametrize("values", [[1.5], [1.0, 2.0], [3.0, 1.0, 1.5]])
def test_fewer_than_four_values_have_no_interval(values):
    estimate = median_interval(values, seed=0)
    assert (estimate.median, estimate.low, estimate.high) == (1.5, None, None)


def test_equal_values_have_an_interval_of_no_width():
    estimate = median_interval([2.0] * 6, seed=0)
    assert (estimate.median, estimate.low, estimate.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(("low", "high"), [(None, 2.0), (0.5, None), (1.2, 2.0)])
def test_an_interval_that_does_not_hold_its_median_is_refused(low, high):
    with pytest.raises(ValueError, match="interval"):
        Estimate(1.0, low, high)


def test_interval_ends_where_the_exact_bootstrap_distribution_does():
    # The median of a resample of n = 2m + 1 values is at most the k-th smallest when
    # more than m of n draws are: a binomial tail.
    n, values = 21, np.arange(21.0)

    def at_most(k: int) -> float:
        chance = (k + 1) / n
        return sum(
            math.comb(n, i) * chance**i * (1 - chance) ** (n - i)
            for i in range(n // 2 + 1, n + 1)
        )

    low = next(k for k in range(n) if at_most(k) >= 0.025)
    high = next(k for k in range(n) if at_most(k) >= 0.975)
    estimate = median_interval(values, seed=1)
    assert (estimate.low, estimate.high) == (low, high)


def test_same_seed_gives_the_same_interval():
    values = np.random.default_rng(0).normal(size=24)
    assert median_interval(values, seed=3) == median_interval(values, seed=3)


@pytest.mark.parametrize("size", [6, 24])
def test_interval_holds_the_true_median_in_about_95_of_100_sets_of_timings(size):
    random = np.random.default_rng(7)
    runs, held = 200, 0
    for seed in range(runs):
        estimate = median_interval(random.lognormal(0.3, 0.2, size), seed)
        held += estimate.low <= math.exp(0.3) <= estimate.high
    assert 0.89 <= held / runs <= 0.99


def test_equal_samples_are_from_one_distribution():
    assert same_distribution([1, 1, 2, 5], [5, 1, 2, 1], seed=0) == 1.0


def test_two_tokens_follow_fishers_exact_distribution():
    # Six and two of eight 1s: tables at least as far from even have chances of
    # C(8, k) C(8, 8 - k) / C(16, 8), k = 0, 1, 2, 6, 7, 8.
    first, second = [1] * 6 + [0] * 2, [1] * 2 + [0] * 6
    exact = sum(math.comb(8, k) ** 2 for k in (0, 1, 2, 6, 7, 8)) / math.comb(16, 8)
    assert same_distribution(first, second, seed=0) == pytest.approx(exact, abs=0.015)


def test_different_distributions_are_told_apart():
    random = np.random.default_rng(0)
    first = random.integers(0, 8, 400)
    second = np.where(random.random(400) < 0.3, 0, random.integers(0, 8, 400))
    assert same_distribution(first, second, seed=0) < 0.001


def test_equal_distributions_rarely_look_different_also_with_rare_tokens():
    random = np.random.default_rng(2)
    chances = 1 / np.arange(1, 61) ** 1.5
    low = 0
    for seed in range(100):
        first, second = random.choice(60, (2, 80), p=chances / chances.sum())
        low += same_distribution(first, second, seed) <= 0.05
    assert low <= 12


def test_samples_may_differ_in_size():
    assert same_distribution([3] * 50 + [4] * 50, [3] * 10 + [4] * 10, seed=0) > 0.9
    assert same_distribution([3] * 90 + [4] * 10, [3] * 1 + [4] * 19, seed=0) < 0.001
