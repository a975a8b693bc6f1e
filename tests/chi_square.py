"""Pearson's chi-square test: does a sample follow a known distribution?"""

import math

import numpy as np

LEAST = 5.0  # expected draws below which a cell is joined with others


def chi_square(counts, chances) -> float:
    """The p-value of counts under chances.

    Several samples, each with chances of its own, are tested together: their
    statistics and degrees of freedom add up. Cells of a sample that expect fewer than
    LEAST draws are joined. Nothing is tested, and 1 returned, without two cells.

    Args:
        counts: Shape: (cells,) or (samples, cells).
        chances: Likewise; each sample's are normalised.

    Raises:
        AssertionError: Something was drawn that has no chance.
    """
    counts, chances = np.atleast_2d(counts), np.atleast_2d(chances).astype(np.float64)
    impossible = np.argwhere((chances <= 0) & (counts > 0))
    assert not impossible.size, f"drawn without a chance: {impossible.tolist()}"
    statistic, freedom = 0.0, 0
    for drawn, chance in zip(counts, chances, strict=True):
        if drawn.sum():
            expected = chance / chance.sum() * drawn.sum()
            drawn, expected = _joined(drawn, expected)
            statistic += float(((drawn - expected) ** 2 / expected).sum())
            freedom += len(drawn) - 1
    return upper_gamma(freedom / 2, statistic / 2) if freedom else 1.0


def _joined(drawn: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cells from the smallest on joined until each expects LEAST draws."""
    cells = [[0.0, 0.0]]
    for index in np.argsort(expected):
        if cells[-1][1] >= LEAST:
            cells.append([0.0, 0.0])
        cells[-1][0] += drawn[index]
        cells[-1][1] += expected[index]
    if len(cells) > 1 and cells[-1][1] < LEAST:
        rest = cells.pop()
        cells[-1] = [cells[-1][0] + rest[0], cells[-1][1] + rest[1]]
    joined = np.array(cells)
    return joined[:, 0], joined[:, 1]


def upper_gamma(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function Q(a, x), for a above 0.

    By the power series of its complement below a + 1, by a continued fraction
    (modified Lentz) above. Abramowitz and Stegun, 6.5.29 and 6.5.31.
    """
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        return 1 - scale * total
    tiny, b = 1e-300, x + 1 - a
    c, d = 1 / tiny, 1 / b
    result, n, change = d, 0, 0.0
    while abs(change - 1) > 1e-15:
        n += 1
        b += 2
        d = 1 / (n * (a - n) * d + b or tiny)
        c = b + n * (a - n) / c or tiny
        change = c * d
        result *= change
    return scale * result
