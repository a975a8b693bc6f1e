"""A pair whose greedy output and accepted counts can be computed on paper.

The rule. Token ids sit on a ring (a seeded shuffle), each with a fixed hidden bit. With
x[t] the last token the next one is `ring[place(x[t]) + step]`, where step is 1 if
bit(x[t - lag]) is +1 and else 2. The walk depends on the current token and on the one
exactly `lag` places back, and a real transformer computes it, so mistakes show:

* An attention head of one target layer finds the token `lag` back purely by rotary
  distance: a stale, missing or shifted key, or a wrong offset, changes the output.
* Every layer writes its own signature into two channels; the drafter's `fc` cancels
  them only if fed the right layers in the right order.
* The drafter's anchor head finds the anchor by content, its lag head finds by distance
  the context row each block row needs: wrong context rows, offsets or masks cost
  accepted tokens.
* The drafter's own logits are right only as a set; the order comes from the selector's
  codebooks walked from the anchor.
* The convolutions are the identity on meaningful channels and random on unused ones, so
  a wrong layout of their coefficients disturbs the meaningful ones.

A right implementation accepts the whole block at any prompt of more than 2 * lag
tokens. With `partial` a seeded fraction of tokens are bad predecessors: after one of
them the drafter proposes the other step, which is always wrong.

The other families keep the target's checks and those of the context:

* A DSpark drafter's rows say in which direction the walk leans, its Markov head which
  two tokens may follow the one before; only both together name the token. After a bad
  predecessor the head allows two tokens that are never right, and the confidence head
  knows.
* A DFlash drafter's rows decide alone, so the rule is another one, that each row can
  compute: the next token is `ring[place(x[t - lag]) + 1]`, a copy with one step. A row
  finds its source by distance, in the context or at the anchor; a row whose source
  would be a later row of the block, so every slot after `lag + 1`, is wrong. `partial`
  makes some tokens bad sources, whose copy is never right.

With eos "ring" the two end-of-sequence ids are neighbours on the ring, so no walk can
jump over both; "off" keeps them off it.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from oracle_families import (
    BIT,
    CODES,
    CONST,
    ERROR,
    FILL,
    GATE,
    LAG,
    SIGNATURE,
    TOKEN,
    carry_source,
    copy_source,
    lean,
    markov_and_confidence,
)
from pair_files import EOS, EOS2, MASK, SPECIALS

if TYPE_CHECKING:
    from pairs import PairOptions

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Ring:
    """The order of the tokens and what is drawn for each, indexed by token id.

    Attributes:
        order: Token ids in ring order. Shape: (N,).
        place: Where a token sits; -1 for the mask. Shape: (V,).
        bit: +1 or -1. Shape: (V,).
        bad: Whether the drafter goes wrong after the token. Shape: (V,).
    """

    order: np.ndarray
    place: np.ndarray
    bit: np.ndarray
    bad: np.ndarray

    @classmethod
    def of(cls, opts: "PairOptions") -> "Ring":
        rng = np.random.default_rng(opts.seed)
        order = rng.permutation(np.arange(len(SPECIALS), opts.vocab))
        if opts.eos == "ring":
            order = np.concatenate([[EOS, EOS2], order])
        place = np.full(opts.vocab, -1, dtype=np.int64)
        place[order] = np.arange(len(order))
        bit = np.where(rng.random(opts.vocab) < 0.5, 1, -1)
        bad = rng.random(opts.vocab) < opts.partial if opts.copies else None
        if bad is not None:  # the bit tells the drafter, the target does not read it
            bit = np.where(bad, -1, 1)
        for special in range(len(SPECIALS)):  # those off the ring borrow a place on it
            if place[special] < 0 and special != MASK:
                place[special] = int(rng.integers(8, len(order) // 2))
        if bad is None:
            bad = rng.random(opts.vocab) < opts.partial
        return cls(order, place, bit, bad)


@dataclass(frozen=True)
class Oracle:
    """What an oracle pair must do, computed without a model.

    Attributes:
        drafted: Tokens of one block.
        ends: Ids that end a walk; set another frozenset for other stop tokens.
        copies: The rule of DFlash pairs.
    """

    ring: Ring
    lag: int
    drafted: int
    ends: frozenset[int]
    copies: bool = False

    @classmethod
    def of(cls, opts: "PairOptions") -> "Oracle":
        ends = frozenset(opts.eos_token_ids)
        return cls(Ring.of(opts), opts.lag, opts.drafted, ends, opts.copies)

    def prompt(self, length: int, start: int = 0) -> list[int]:
        """`length` ring tokens without an end; each `start` gives another prompt.

        The last one sits just past the ends on the ring: the longest run before one.
        """
        order = self.ring.order
        rng = np.random.default_rng(1000 + start)
        ids: list[int] = []
        while len(ids) < length:
            token = int(order[rng.integers(0, len(order))])
            if token not in self.ends:
                ids.append(token)
        if ids:
            ids[-1] = int(order[(2 + start) % len(order)])
        return ids

    def step(self, history: list[int]) -> int:
        """The token after `history`, which must be longer than `lag`."""
        if len(history) <= self.lag:
            raise ValueError(f"the rule needs more than lag = {self.lag} tokens")
        order, place, bit = self.ring.order, self.ring.place, self.ring.bit
        if self.copies:
            return int(order[(place[history[-1 - self.lag]] + 1) % len(order)])
        step = 1 if bit[history[-1 - self.lag]] > 0 else 2
        return int(order[(place[history[-1]] + step) % len(order)])

    def walk(self, prompt: list[int], count: int) -> list[int]:
        """What greedy decoding gives: `count` tokens, or fewer with an end last."""
        history = list(prompt)
        for _ in range(count):
            history.append(self.step(history))
            if history[-1] in self.ends:
                break
        return history[len(prompt) :]

    def cycles(
        self, prompt: list[int], count: int, width: int | None = None
    ) -> list[int]:
        """Accepted drafted tokens of every cycle until `count` tokens are out.

        The first token comes from the prefill and belongs to no cycle. With r tokens
        left a cycle verifies at most r - 1, so the last may be one plain step with 0.
        A cycle that ends on a drafted end gives no token after it.

        Args:
            prompt: More than 2 * lag tokens; earlier rows have no token lag back.
            width: Drafted tokens verified per cycle; all of a block unless capped.
        """
        if len(prompt) <= 2 * self.lag:
            raise ValueError(f"needs a prompt of more than {2 * self.lag} tokens")
        return [accepted for _, accepted in self._cycles(prompt, count, width, False)]

    def cut_cycles(
        self, prompt: list[int], count: int, width: int | None = None
    ) -> list[tuple[int, int]]:
        """Drafted and accepted of every cycle where a confidence head cuts.

        It cuts just before the first slot whose predecessor is bad, so a cycle may
        draft nothing.
        """
        return self._cycles(prompt, count, width, True)

    def _cycles(
        self, prompt: list[int], count: int, width: int | None, cut: bool
    ) -> list[tuple[int, int]]:
        if len(prompt) <= 2 * self.lag:
            raise ValueError(f"needs a prompt of more than {2 * self.lag} tokens")
        width = self.drafted if width is None else width
        out = self.walk(prompt, count)
        past_ends = replace(self, ends=frozenset())
        history = prompt + past_ends.walk(prompt, len(out) + width)
        emitted, cycles = 1, []
        while emitted < len(out):
            most = min(width, count - emitted - 1)
            right = 0
            while right < most and self._is_right(
                history, len(prompt) + emitted, right
            ):
                right += 1
            accepted = min(right, len(out) - emitted)
            cycles.append((right if cut else most, accepted))
            emitted += min(accepted + 1, len(out) - emitted)
        return cycles

    def _is_right(self, history: list[int], start: int, slot: int) -> bool:
        """Whether the drafter is right about `history[start + slot]`.

        Args:
            start: Position after the anchor.
        """
        if not self.copies:
            return not self.ring.bad[history[start + slot - 1]]
        seen = slot <= self.lag  # else its source is a later row of the block
        return seen and not self.ring.bad[history[start + slot - 1 - self.lag]]


def build_oracle(opts: "PairOptions") -> tuple[Weights, Weights, dict[str, float]]:
    """Weights of target and drafter, and the margins between right and wrong.

    Raises:
        ValueError: The sizes leave no room for the construction.
    """
    plan = _Plan(opts)
    plan.refuse_small_sizes()
    target = _target(plan)
    drafter = _drafter(plan)
    margins = plan.margins()
    floor = 0.02 if opts.dtype != "float32" else 1e-3
    waves = len(plan.waves)
    set_gap = margins.get("candidate_set_gap", math.inf)
    if margins["target_token_drop"] / waves < floor or set_gap / waves < floor / 2:
        raise ValueError(f"margins too thin for {opts.dtype}: {margins}")
    return target, drafter, margins


class _Plan:
    """The sizes, channels and scales both networks are built from."""

    def __init__(self, opts: "PairOptions"):
        self.opts = opts
        self.rng = np.random.default_rng(opts.seed + 1)
        self.ring = Ring.of(opts)
        self.count = len(self.ring.order)
        self.waves = 2.0 ** np.arange(
            max(1, math.floor(math.log2(self.count / 2.5))) + 1
        )
        self.reach = 2 * opts.drafted  # the furthest place of a block
        self.low = self.waves[self.count / self.waves >= 2 * (self.reach + 2)]
        width = 2 * len(self.waves)
        self.code = slice(CODES, CODES + width)
        self.answer = (
            self.code if opts.tied else slice(CODES + width, CODES + 2 * width)
        )
        group = opts.conv_group
        self.free = np.arange(-(-self.answer.stop // group) * group, opts.hidden)
        self.noise = 0.3 if len(self.free) >= 8 else 0.0  # norm of the unused part
        self.codes = self.ring_code(np.arange(self.count), self.waves)  # (N, 2F)
        self.gain = 4.0 if opts.tied else 1.0  # strength of the answer in the stream
        self.work_layer = opts.layers // 2
        self.side = 0.15 / math.sqrt(opts.layers)  # of what layers write to `free`

    def refuse_small_sizes(self) -> None:
        opts, waves = self.opts, len(self.waves)
        enough = {
            "hidden for a tied pair": (128 if opts.tied else 0, opts.hidden),
            "hidden": (self.answer.stop, opts.hidden),
            "intermediate": (4 * waves + 3, opts.intermediate),
            "lag": (1 if opts.copies else opts.drafted, opts.lag),
            "slow waves (raise vocab)": (1, len(self.low)),
            "draft_heads": (2, opts.draft_heads),
            "draft_head_dim": (2 * len(self.low) + 1, opts.draft_head_dim),
        }
        if opts.family == "dflash2":
            enough |= {
                "top_k": (self.reach, opts.top_k),
                "rank": (4 * waves, opts.rank),
            }
        if opts.family == "dspark":
            enough |= {
                "rank": (2 * waves + 1, opts.rank),
                "draft_intermediate": (4 * len(self.low), opts.draft_intermediate),
            }
        if opts.copies:
            enough |= {
                "head_dim": (2 * waves, opts.head_dim),
                "draft_head_dim": (2 * waves + 1, opts.draft_head_dim),
            }
        for what, (least, found) in enough.items():
            if found < least:
                raise ValueError(f"{what} is {found}, an oracle needs {least}")
        if opts.family != "dflash2" and (opts.tied or opts.dtype != "float32"):
            raise ValueError(f"a {opts.family} oracle is untied and float32")
        if opts.layer_type_list[0] == "sliding_attention":
            least = opts.lag + 1 + opts.block_size
            if opts.sliding_window <= least:
                raise ValueError(f"sliding_window must exceed {least}")

    def ring_code(self, places: np.ndarray, waves: np.ndarray) -> np.ndarray:
        """Cosines then sines of ring places. Shape: (len(places), 2 * len(waves))."""
        turns = np.asarray(places, dtype=np.float64)[:, None] * waves[None]
        angle = 2 * np.pi * (turns % self.count) / self.count
        return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)

    def turned(self, shift: float, waves: np.ndarray) -> np.ndarray:
        """The matrix that turns the code of place s into that of s + shift."""
        count = len(waves)
        angle = 2 * np.pi * (shift * waves) / self.count
        i = np.arange(count)
        matrix = np.zeros((2 * count, 2 * count))
        matrix[i, i], matrix[i, count + i] = np.cos(angle), -np.sin(angle)
        matrix[count + i, i], matrix[count + i, count + i] = (
            np.sin(angle),
            np.cos(angle),
        )
        return matrix

    @cached_property
    def embedding(self) -> np.ndarray:
        """Constant, bit and ring code of every token. Shape: (V, D)."""
        opts, ring = self.opts, self.ring
        table = np.zeros((opts.vocab, opts.hidden))
        table[:, CONST] = 1
        ids = np.arange(opts.vocab) != MASK
        table[ids, TOKEN] = 1
        table[ids, BIT] = ring.bit[ids]
        table[ids, self.code] = self.codes[ring.place[ids]]
        if opts.tied:  # a special on a borrowed place must not tie with its owner
            on_ring = set(ring.order[:2].tolist())
            for special in set(range(len(SPECIALS))) - {MASK} - on_ring:
                table[special, self.code] *= 0.5
                table[special, FILL] = math.sqrt(0.75 * len(self.waves))
        if self.noise:
            noise = self.rng.standard_normal((opts.vocab, len(self.free)))
            noise *= self.noise / np.linalg.norm(noise, axis=1, keepdims=True)
            table[np.ix_(ids, self.free)] = noise[ids]
        return table.astype(np.float32)

    @cached_property
    def signatures(self) -> np.ndarray:
        """Two signs per layer, unlike those of the layer before. Shape: (N + 1, 2)."""
        signs = np.zeros((self.opts.layers + 1, 2))
        for layer in range(1, self.opts.layers + 1):
            while not signs[layer].any() or (signs[layer] == signs[layer - 1]).all():
                signs[layer] = self.rng.choice([-1.0, 1.0], 2)
        return signs

    @property
    def stream_norm(self) -> float:
        """Squared norm of a token's stream before signature, lag and answer."""
        return 3 + len(self.waves) + self.noise**2

    def rms(self, layer: int, *, lag: bool, answer: bool) -> float:
        """Root mean square of the stream entering `layer`, with what is in it."""
        squared = self.stream_norm + float((self.signatures[layer] ** 2).sum())
        if (lag or answer) and not self.opts.copies:
            squared += 1
        if answer:
            added = self.gain**2 - 1 if self.opts.tied else 1
            squared += added * len(self.waves)
        return math.sqrt(squared / self.opts.hidden)

    @cached_property
    def drop(self) -> float:
        """How far the best wrong token's code product lies below the right one's."""
        products = self.codes @ self.codes[0]
        return float(len(self.waves) - np.delete(products, 0).max())

    @cached_property
    def head_scale(self) -> float:
        if self.opts.tied:
            return 1.0
        end = self.rms(self.opts.layers, lag=True, answer=True)
        return self.opts.logit_margin * end / self.drop

    @cached_property
    def set_scores(self) -> np.ndarray:
        """What the drafter's own logits give each place after the anchor, unscaled."""
        offset = np.arange(self.count) - (1 + self.reach) / 2
        angle = 2 * np.pi * offset[:, None] * self.low[None] / self.count
        return np.cos(angle).sum(1)

    def margins(self) -> dict[str, float]:
        room = float(len(self.free))
        if self.opts.family != "dflash2":  # only a selector has a set of candidates
            return {"target_token_drop": self.drop, "unused_channels": room}
        ordered = np.sort(self.set_scores)[::-1]
        inside = self.set_scores[1 : self.reach + 1]
        return {
            "target_token_drop": self.drop,
            "candidate_set_gap": float(inside.min() - ordered[self.opts.top_k]),
            "unary_spread": float(inside.max() - ordered[self.opts.top_k - 1]),
            "unused_channels": room,
        }

    def linear(self, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        scale = gain / math.sqrt(columns)
        return (self.rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    def into_free(self, columns: int) -> np.ndarray:
        """A [D, columns] weight that writes noise to the unused channels only."""
        weight = np.zeros((self.opts.hidden, columns), dtype=np.float32)
        if self.noise:
            room = len(self.free)
            weight[self.free] = self.linear(
                room, columns, self.side / math.sqrt(room) * 2
            )
        return weight


def rotary_frequencies(size: int, theta: float) -> np.ndarray:
    return theta ** (-np.arange(0, size, 2) / size)


def distance_scale(frequencies: np.ndarray, low: int, high: int) -> float:
    """Score per rotary pair that makes every other distance lose 16 nats.

    Raises:
        ValueError: The pairs cannot tell the distances low..high apart.
    """
    least = math.inf
    for start in range(low, high, 65536):
        away = np.arange(start, min(high, start + 65536))
        away = away[away != 0]
        loss = (1 - np.cos(frequencies[None] * away[:, None])).sum(1)
        least = min(least, float(loss.min()))
    scale = 16.0 / max(least, 1e-9)
    if scale * len(frequencies) > 4000:
        raise ValueError(f"head_dim is too small to tell {high} distances apart")
    return scale


def _target(plan: _Plan) -> Weights:
    opts = plan.opts
    weights = {"model.embed_tokens.weight": plan.embedding}
    _ = plan.signatures  # drawn here, so that a seed always means the same weights
    for index in range(opts.layers):
        layer = {
            **_target_attention(plan, index),
            **_target_mlp(plan, index),
            "input_layernorm.weight": np.ones(opts.hidden, dtype=np.float32),
            "post_attention_layernorm.weight": np.ones(opts.hidden, dtype=np.float32),
        }
        weights |= {f"model.layers.{index}.{name}": w for name, w in layer.items()}
    weights["model.norm.weight"] = np.ones(opts.hidden, dtype=np.float32)
    if not opts.tied:
        head = np.zeros((opts.vocab, opts.hidden))
        head[plan.ring.order, plan.answer] = plan.codes * plan.head_scale
        if opts.copies:  # the target never writes FILL, so it never says the mask
            head[MASK, FILL] = 2 * len(plan.waves) * plan.head_scale
        weights["lm_head.weight"] = head.astype(np.float32)
    return weights


def _target_attention(plan: _Plan, index: int) -> Weights:
    """Noise into unused channels; in the work layer head 0 fetches the bit lag back.

    Other query heads of that key head see its keys too, but write only noise.
    """
    opts, size = plan.opts, plan.opts.head_dim
    query = plan.linear(opts.heads * size, opts.hidden)
    key = plan.linear(opts.kv_heads * size, opts.hidden)
    value = plan.linear(opts.kv_heads * size, opts.hidden)
    out = plan.into_free(opts.heads * size)
    if index == plan.work_layer:
        turns = rotary_frequencies(size, opts.rope_theta)
        scale = distance_scale(turns, -opts.lag, opts.max_ctx)
        rms = plan.rms(index, lag=False, answer=False)
        out[:, :size] = 0
        amplitude = math.sqrt(scale * math.sqrt(size)) * rms
        query[:size], key[:size], value[:size] = 0, 0, 0
        query[: size // 2, CONST] = amplitude
        key[: size // 2, CONST] = amplitude * np.cos(turns * opts.lag)
        key[size // 2 : size, CONST] = amplitude * np.sin(turns * opts.lag)
        if opts.copies:
            copy_source(plan, value, out, rms)
        else:
            value[0, BIT], out[LAG, 0] = 1, rms
    return {
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": out,
    }


def _target_mlp(plan: _Plan, index: int) -> Weights:
    """Replace the signature; in the work layer also write the answer's code."""
    opts, work = plan.opts, plan.work_layer
    gate = plan.linear(opts.intermediate, opts.hidden)
    up = plan.linear(opts.intermediate, opts.hidden)
    down = plan.into_free(opts.intermediate)
    answered = index >= work if opts.copies else index > work
    rms = plan.rms(index, lag=index >= work, answer=answered)
    # Units 0 to 2: the new signature in, the two channels of the old one out.
    gate[:3], up[:3], down[:, :3] = 0, 0, 0
    gate[:3, CONST] = GATE
    up[0, CONST] = up[1, SIGNATURE] = up[2, SIGNATURE + 1] = 1
    gated = GATE / rms
    unit = gated / (1 + math.exp(-min(gated, 60))) / rms
    down[SIGNATURE : SIGNATURE + 2, 0] = plan.signatures[index + 1] / unit
    down[SIGNATURE, 1] = down[SIGNATURE + 1, 2] = -1 / unit
    if index == work and not opts.copies:
        width = 2 * len(plan.waves)
        one, two, end = 3, 3 + width, 3 + 2 * width  # units for LAG = +1, for -1
        gate[one:end], up[one:end], down[:, one:end] = 0, 0, 0
        gate[one:two, LAG], gate[two:end, LAG] = GATE, -GATE
        channels = np.arange(plan.code.start, plan.code.stop)
        up[np.arange(one, two), channels] = 1
        up[np.arange(two, end), channels] = 1
        back = rms * rms / GATE
        kept = np.eye(width) * back if opts.tied else 0  # tied: the answer replaces it
        for start, step in ((one, 1), (two, 2)):
            answer = plan.turned(step, plan.waves) * back * plan.gain
            down[plan.answer, start : start + width] = answer - kept
    return {
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": down,
    }


def _drafter(plan: _Plan) -> Weights:
    opts = plan.opts
    ones = np.ones(opts.hidden, dtype=np.float32)
    weights = {"fc.weight": _fuse(plan), "hidden_norm.weight": ones}
    for index in range(opts.draft_layers):
        layer = {
            **_drafter_attention(plan, first=index == 0),
            **_drafter_mlp(plan, first=index == 0),
            "input_layernorm.weight": ones,
            "post_attention_layernorm.weight": ones,
        }
        if opts.family == "dflash2":
            layer |= _convolution(plan, "attention_conv")
            layer |= _convolution(plan, "mlp_conv")
        weights |= {f"layers.{index}.{name}": w for name, w in layer.items()}
    weights["norm.weight"] = ones
    if opts.family == "dflash2":
        weights |= _selector(plan)
    elif opts.family == "dspark":
        weights |= markov_and_confidence(plan)
    return weights


def _drafter_mlp(plan: _Plan, *, first: bool) -> Weights:
    inner, size = plan.opts.draft_intermediate, plan.opts.hidden
    gate, up = plan.linear(inner, size), plan.linear(inner, size)
    down = plan.into_free(inner)
    if first and plan.opts.family == "dspark":
        lean(plan, gate, up, down)
    return {
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": down,
    }


def _fuse(plan: _Plan) -> np.ndarray:
    """Constant and bit through; ERROR is 0 only for the right taps in order."""
    opts = plan.opts
    count, size = len(opts.taps), opts.hidden
    fuse = np.zeros((size, count * size), dtype=np.float32)
    for j, tap in enumerate(opts.taps):
        start = j * size
        fuse[CONST, start + CONST] = 1 / count
        fuse[BIT, start + BIT] = 1 / count
        if opts.copies:
            channels = np.arange(plan.code.start, plan.code.stop)
            fuse[channels, start + channels] = 1 / count
        # Unequal weights: what differs in both channels must not cancel.
        signs = plan.rng.choice([-1.0, 1.0], 2) * (1 + 0.25 * j) * (1, 1.5)
        for m in range(2):
            fuse[ERROR, start + SIGNATURE + m] = signs[m]
            fuse[ERROR, start + CONST] -= signs[m] * plan.signatures[tap + 1, m]
    if plan.noise:
        room = len(plan.free)
        for j in range(count):
            rows_columns = np.ix_(plan.free, j * size + plan.free)
            fuse[rows_columns] = plan.linear(room, room, 0.3 / count)
    return fuse


def _drafter_attention(plan: _Plan, *, first: bool) -> Weights:
    opts, size = plan.opts, plan.opts.draft_head_dim
    query = plan.linear(opts.draft_heads * size, opts.hidden)
    key = plan.linear(opts.draft_kv_heads * size, opts.hidden)
    value = plan.linear(opts.draft_kv_heads * size, opts.hidden)
    norm = np.ones(size)
    out = plan.into_free(opts.draft_heads * size)
    if first:
        query[: 2 * size], key[:], value[:], out[:, : 2 * size] = 0, 0, 0, 0
        _find_anchor_and_lag(plan, query, key, norm)
        carry = carry_source if opts.copies else _carry_code_and_bit
        carry(plan, value, out)
    return {
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": out,
        "self_attn.q_norm.weight": norm.astype(np.float32),
        "self_attn.k_norm.weight": norm.astype(np.float32),
    }


def _find_anchor_and_lag(
    plan: _Plan, query: np.ndarray, key: np.ndarray, norm: np.ndarray
) -> None:
    """Head 0 scores the anchor by content, head 1 a row of the context by distance.

    The row holds the token `lag` back from the one before the row's own prediction.

    The slowest rotary pair hardly turns and carries content; the next is left out,
    the faster ones measure distance. After the head norms a row has norm sqrt(size),
    so `norm` sets the scores: 24 for the anchor, `scale` per pair for the distance.
    """
    opts, size = plan.opts, plan.opts.draft_head_dim
    half, pairs, slowest = size // 2, size // 2 - 2, size // 2 - 1
    back = opts.lag + opts.first_row
    turns = rotary_frequencies(size, opts.draft_rope_theta)[:pairs]
    scale = distance_scale(turns, -back - opts.block_size, opts.max_ctx)
    query[slowest, CONST] = 1
    query[size : size + pairs, CONST] = 1
    for head in range(opts.draft_kv_heads):
        fast = slice(head * size, head * size + pairs)
        twin = slice(head * size + half, head * size + half + pairs)
        key[fast, CONST] = np.cos(turns * back)
        key[twin, CONST] = np.sin(turns * back)
        if not opts.copies:  # where only distances count, the anchor is as any row
            key[head * size + slowest, TOKEN] = math.sqrt(pairs)
        key[fast, ERROR] = plan.rng.standard_normal(pairs)
        key[twin, ERROR] = plan.rng.standard_normal(pairs)
    norm[slowest] = math.sqrt(24 * math.sqrt(2 / size))
    norm[:pairs] = norm[half : half + pairs] = math.sqrt(
        scale * pairs / math.sqrt(size)
    )


def _carry_code_and_bit(plan: _Plan, value: np.ndarray, out: np.ndarray) -> None:
    """Head 0 brings the anchor's slow code, turned to mid-block; head 1 the bit."""
    opts, size, slow = plan.opts, plan.opts.draft_head_dim, 2 * len(plan.low)
    places = np.searchsorted(plan.waves, plan.low)
    channels = np.concatenate([places, len(plan.waves) + places])
    for head in range(opts.draft_kv_heads):
        value[head * size + np.arange(slow), plan.code.start + channels] = 1
        value[head * size + slow, BIT] = 1
    anchor_rms = math.sqrt(plan.stream_norm / opts.hidden)
    context_rms = math.sqrt((2 + (0.3 * plan.noise) ** 2) / opts.hidden)
    middle = plan.turned((1 + plan.reach) / 2, plan.low) * anchor_rms
    out[np.ix_(plan.answer.start + channels, np.arange(slow))] = middle
    out[LAG, size + slow] = context_rms


def _convolution(plan: _Plan, name: str) -> Weights:
    """The identity on meaningful channels, random kernels on the unused ones."""
    opts = plan.opts
    groups, kernel = opts.hidden // opts.conv_group, opts.conv_kernel
    base = np.zeros((2, kernel, opts.hidden))
    base[:, 0] = 1
    projection = np.zeros((2, kernel, groups, opts.hidden), dtype=np.float32)
    if plan.noise:
        base[:, :, plan.free] += 0.3 * plan.rng.standard_normal(
            (2, kernel, len(plan.free))
        )
        unused = np.unique(plan.free // opts.conv_group)
        rows = plan.linear(2 * kernel * len(unused), opts.hidden, 3.0)
        projection[:, :, unused] = rows.reshape(2, kernel, len(unused), opts.hidden)
    return {
        f"{name}.base_kernel": base.astype(np.float32),
        f"{name}.kernel_projection.weight": projection.reshape(-1, opts.hidden),
    }


def _selector(plan: _Plan) -> Weights:
    """Codebooks that order the candidates: first half for step 1, second for step 2."""
    opts, ring = plan.opts, plan.ring
    width, half = 2 * len(plan.waves), opts.rank // 2
    place = np.where(ring.place < 0, 0, ring.place)
    before, after = np.zeros((2, opts.vocab, opts.rank))
    for start, other, step in ((0, ring.bad, 1), (half, -1 * ring.bad, 2)):
        columns = slice(start, start + width)
        before[:, columns] = plan.codes[(place + other) % plan.count]
        after[:, columns] = plan.codes[(place - step) % plan.count]
    spare = half - width
    if spare or opts.rank % 2:
        for table in (before, after):
            table[:, width:half] = plan.rng.standard_normal((opts.vocab, spare))
            rest = opts.rank - half - width
            table[:, half + width :] = plan.rng.standard_normal((opts.vocab, rest))
    spread = plan.margins()["unary_spread"]
    strength = plan.head_scale * max(4.0 * spread / plan.drop, 4.0 / plan.drop) / 2
    project = np.zeros((opts.rank, opts.hidden))
    project[:width, CONST], project[:width, LAG] = strength, strength
    second = slice(half, half + width)
    project[second, CONST], project[second, LAG] = strength, -strength
    return {
        "candidate_selector.predecessor_codebook": before.astype(np.float32),
        "candidate_selector.successor_codebook": after.astype(np.float32),
        "candidate_selector.hidden_projection.weight": project.astype(np.float32),
    }
