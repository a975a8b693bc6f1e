"""The cycle loops of both backends, token by token and cycle by cycle."""

import mlx.core as mx
import numpy as np
import pytest
from tiny import (
    TARGET,
    assert_close,
    drafter_config,
    drafter_numbers,
    mlx_drafter,
    mlx_target,
    torch_drafter,
    torch_target,
)

from mlx_dflash2 import decode as mlx_decode
from mlx_dflash2 import loading as mlx_loading
from mlx_dflash2 import sampling as mlx_sampling

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from mlx_dflash2.torch.decode import decode  # noqa: E402
from mlx_dflash2.torch.loading import load_drafter, load_target  # noqa: E402
from mlx_dflash2.torch.sampling import SamplingConfig, probabilities  # noqa: E402

VOCAB = 16  # so few tokens that a random drafter is right now and then
PROMPT = [15, 10, 10, 14, 9, 12, 13, 3, 0]  # no decision hangs on rounding after it


def recorded(drafter) -> list[list[int]]:
    """The tokens of every proposal a drafter will make."""
    proposals, propose = [], drafter.propose

    def record(*args, **options):
        proposal = propose(*args, **options)
        proposals.append(proposal.tokens.tolist())
        return proposal

    # a plain attribute: an mlx module would take it for a parameter otherwise
    object.__setattr__(drafter, "propose", record)
    return proposals


def mlx_cycles(target, drafter, prompt, *, max_tokens, eos, step=2048, drafts=None):
    """Tokens, drafted, accepted and emitted per cycle of the MLX loop."""
    rule = mlx_sampling.TokenRule(mlx_sampling.SamplingConfig())
    run = mlx_decode.Decoding(target, drafter, rule, seed=0, prefill_step_size=step)
    tokens, counts = [], []
    for emission in run.run(
        prompt,
        max_tokens=max_tokens,
        eos=frozenset(eos),
        num_draft_tokens=drafts or drafter.config.num_draft_tokens,
    ):
        tokens += emission.tokens
        if emission.drafted is not None:
            counts.append((emission.drafted, emission.accepted, len(emission.tokens)))
    return tuple(tokens), counts


def counts_of(stats) -> list[tuple[int, int, int]]:
    return list(
        zip(
            stats.drafted_per_cycle,
            stats.accepted_per_cycle,
            stats.emitted_per_cycle,
            strict=True,
        )
    )


@pytest.fixture(scope="module")
def targets():
    config = TARGET | {"vocab_size": VOCAB}
    return torch_target(config), mlx_target(config)


@pytest.mark.parametrize("kind", ["full", "sliding", "mixed"])
@pytest.mark.parametrize("causal", [None, False, True])
def test_random_pairs_draft_accept_and_emit_alike(targets, kind, causal):
    """Forty tokens; contexts pass the window of twelve, most appends are one row."""
    small = {"vocab_size": VOCAB, "mask_token_id": 15}
    config = drafter_config(kind, is_causal=causal, **small)
    numbers = drafter_numbers(config)
    drafters = torch_drafter(config, numbers), mlx_drafter(config, numbers)
    expected_drafts, drafts = map(recorded, drafters)
    expected = decode(targets[0], drafters[0], PROMPT, max_tokens=40, eos=())
    tokens, counts = mlx_cycles(targets[1], drafters[1], PROMPT, max_tokens=40, eos=())
    assert tokens == expected.tokens
    assert counts == counts_of(expected.stats)
    for cycle, (one, other) in enumerate(zip(drafts, expected_drafts, strict=True)):
        assert one == other[: len(one)], f"cycle {cycle}"
    plain = decode(targets[0], None, PROMPT, max_tokens=40, eos=())
    assert tokens == plain.tokens


def test_some_of_those_drafts_are_accepted(targets):
    """Else the test above would only see rejections."""
    config = drafter_config(vocab_size=VOCAB, mask_token_id=15)
    drafter = torch_drafter(config, drafter_numbers(config))
    result = decode(targets[0], drafter, PROMPT, max_tokens=40, eos=())
    assert 0 < result.stats.accepted < result.stats.drafted


@pytest.mark.parametrize("step", [1, 3, 2048])
def test_both_prefill_in_chunks_alike(targets, step):
    config = drafter_config("sliding", vocab_size=VOCAB, mask_token_id=15)
    numbers = drafter_numbers(config)
    drafters = torch_drafter(config, numbers), mlx_drafter(config, numbers)
    prompt = np.random.default_rng(0).integers(0, VOCAB, 30).tolist()
    expected = decode(
        targets[0], drafters[0], prompt, max_tokens=16, eos=(), prefill_step=step
    )
    tokens, counts = mlx_cycles(
        targets[1], drafters[1], prompt, max_tokens=16, eos=(), step=step
    )
    assert tokens == expected.tokens
    assert counts == counts_of(expected.stats)


@pytest.fixture(scope="module")
def oracle(pair):
    made = pair(partial=0.3, rope_theta=5e6, layer_types="mixed", is_causal=False)
    target, _ = mlx_loading.load_target(made.target)
    drafter = mlx_loading.load_drafter(made.drafter, target)
    reference = load_target(made.target)
    return made.oracle, (reference, load_drafter(made.drafter)), (target, drafter)


@pytest.mark.parametrize("budget", [1, 2, 7, 8, 9, 40, 61])
def test_oracle_pairs_agree_at_every_budget(oracle, budget):
    known, reference, ours = oracle
    prompt = known.prompt(40)
    expected = decode(*reference, prompt, max_tokens=budget, eos=known.ends)
    tokens, counts = mlx_cycles(*ours, prompt, max_tokens=budget, eos=known.ends)
    assert tokens == expected.tokens
    assert counts == counts_of(expected.stats)


@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_they_agree_with_fewer_drafts_verified(oracle, drafts):
    known, reference, ours = oracle
    prompt = known.prompt(40)
    expected = decode(
        *reference, prompt, max_tokens=33, eos=(), num_draft_tokens=drafts
    )
    tokens, counts = mlx_cycles(*ours, prompt, max_tokens=33, eos=(), drafts=drafts)
    assert tokens == expected.tokens
    assert counts == counts_of(expected.stats)


def test_they_stop_alike_at_an_end_at_every_position(oracle):
    known, reference, ours = oracle
    prompt = known.prompt(40)
    walk = known.walk(prompt, 24)
    for position in (0, 1, 2, 4, 7, 8, 9, 16, 23):
        end = walk[position]
        first = walk.index(end)
        expected = decode(*reference, prompt, max_tokens=40, eos=(end,))
        tokens, counts = mlx_cycles(*ours, prompt, max_tokens=40, eos=(end,))
        assert tokens == expected.tokens == tuple(walk[: first + 1]), position
        assert counts == counts_of(expected.stats)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.5, "top_p": 0.8, "min_p": 0.05, "top_k": 6},
    ],
    ids=lambda options: "-".join(options),
)
def test_both_define_the_targets_distribution_alike(options):
    logits = 2 * np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    expected = probabilities(torch.from_numpy(logits), SamplingConfig(**options))
    rule = mlx_sampling.TokenRule(mlx_sampling.SamplingConfig(**options))
    for row, reference in zip(logits, expected, strict=True):
        logprobs = mlx_sampling.log_softmax(mx.array(row)[None])
        found = np.array(rule.probabilities(logprobs, mx.array(1.0)))
        assert ((found > 0) == (reference.numpy() > 0)).all()
        assert_close(found, reference, 1e-6)
