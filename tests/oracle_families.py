"""What an oracle drafter of each family has beyond the common construction.

`plan` is the `_Plan` of `oracle.py`, whose docstring gives the rules.
"""

import math

import numpy as np

# Channels of the residual stream. SIGNATURE takes two; the ring codes start at 8.
CONST, TOKEN, BIT, LAG, SIGNATURE, ERROR, FILL, CODES = 0, 1, 2, 3, 4, 6, 7, 8
GATE = 40.0  # deep in silu's linear part, so a gated unit passes its input on

LEANING = 4.0  # strength of the direction against the anchor's code
SURE = 6.0  # logit of the confidence in a slot that is right


def copy_source(plan, value: np.ndarray, out: np.ndarray, rms: float) -> None:
    """DFlash pairs, target: head 0 turns the code it finds by one step."""
    channels, width = np.arange(plan.code.start, plan.code.stop), 2 * len(plan.waves)
    value[np.arange(width), channels] = 1
    out[plan.answer, :width] = plan.turned(1, plan.waves) * rms


def carry_source(plan, value: np.ndarray, out: np.ndarray) -> None:
    """DFlash pairs, drafter: head 1 does as the target; a bad source says the mask."""
    size, width = plan.opts.draft_head_dim, 2 * len(plan.waves)
    channels = np.arange(plan.code.start, plan.code.stop)
    for head in range(plan.opts.draft_kv_heads):
        start = head * size
        value[start + np.arange(width), channels] = 1
        value[start + width, CONST], value[start + width, BIT] = 0.5, -0.5
    squared = 2 + len(plan.waves) + (0.3 * plan.noise) ** 2
    rms = math.sqrt(squared / plan.opts.hidden)
    out[plan.answer, size : size + width] = plan.turned(1, plan.waves) * rms
    out[FILL, size + width] = rms


def lean(plan, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> None:
    """DSpark: rows prefer near places of the ring where the lag bit is +1, else far.

    The anchor's slow code, turned to mid-block, is turned a quarter of each wave; its
    product with a token's code then rises or falls over all places of the block.
    """
    low, count = len(plan.low), len(plan.waves)
    places = np.searchsorted(plan.waves, plan.low)
    channels = plan.answer.start + np.concatenate([places, count + places])
    width = 2 * low
    gate[: 2 * width], up[: 2 * width], down[:, : 2 * width] = 0, 0, 0
    quarter = np.zeros((width, width))
    one, two = np.arange(low), low + np.arange(low)
    quarter[one, two], quarter[two, one] = -1, 1
    row_squared = (2 + low) / plan.opts.hidden  # of a mask's row
    strength = LEANING * row_squared / GATE
    for start, sign in ((0, 1), (width, -1)):
        units = start + np.arange(width)
        gate[units, LAG] = sign * GATE
        up[units, channels] = 1
        down[np.ix_(channels, units)] = -sign * strength * quarter


def markov_and_confidence(plan) -> dict[str, np.ndarray]:
    """DSpark: the two tokens that may follow, and whether to trust them.

    A good predecessor allows the places one and two on alike, a bad one those three and
    four on. One more column of its table tells the confidence head which it is.
    """
    opts, ring, width = plan.opts, plan.ring, 2 * len(plan.waves)
    place = np.where(ring.place < 0, 0, ring.place)
    rng = plan.rng
    before = rng.standard_normal((opts.vocab, opts.rank)) * 0.5
    after = np.zeros((opts.vocab, opts.rank))
    ahead = np.where(ring.bad, 3.5, 1.5)
    before[:, :width] = plan.ring_code(place + ahead, plan.waves)
    before[:, width] = np.where(ring.bad, -1, 1)
    after[ring.order, :width] = plan.codes * _markov_strength(plan)
    heads = {
        "markov_head.markov_w1.weight": before.astype(np.float32),
        "markov_head.markov_w2.weight": after.astype(np.float32),
    }
    if opts.confidence:
        proj = np.zeros((1, opts.hidden + opts.rank), dtype=np.float32)
        proj[0, opts.hidden + width] = SURE
        heads["confidence_head.proj.weight"] = proj
        heads["confidence_head.proj.bias"] = np.zeros(1, dtype=np.float32)
    return heads


def _markov_strength(plan) -> float:
    """Enough that no lean of a row outweighs the step from allowed to not allowed."""
    away = np.abs(np.arange(plan.count) - 1.5)
    angles = 2 * np.pi * away[:, None] * plan.waves[None] / plan.count
    scores = np.cos(angles).sum(1)
    gap = scores[1] - np.delete(scores, [1, 2]).max()
    squared = 2 + len(plan.low) * (1 + LEANING**2)
    rms = math.sqrt(squared / plan.opts.hidden)  # of a mask's row at the end
    most = 2 * len(plan.low) * (1 + LEANING) / rms * plan.head_scale
    return 2 * most / gap
