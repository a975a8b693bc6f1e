"""The torch side's definition of the target's distribution, and its accept rules."""

import numpy as np
import pytest

from mlx_dflash2.errors import DFlash2Error

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from mlx_dflash2.torch.proposal import Proposal  # noqa: E402
from mlx_dflash2.torch.sampling import (  # noqa: E402
    SamplingConfig,
    accept_greedy,
    accept_sampled,
    probabilities,
)

ROW = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05]))


def chances(**options) -> np.ndarray:
    config = SamplingConfig(**{"temperature": 1.0} | options)
    return probabilities(torch.tensor(ROW)[None] + 3, config)[0].numpy()


def renormed(kept: list[float]) -> np.ndarray:
    return np.array(kept) / sum(kept)


def test_without_filters_it_is_the_softmax_at_the_temperature():
    expected = renormed(list(np.exp(ROW / 0.7)))
    np.testing.assert_allclose(chances(temperature=0.7), expected, rtol=1e-5)


def test_each_filter_keeps_what_it_says():
    kept = {
        (("top_p", 0.6),): [0.4, 0.3, 0, 0, 0],
        (("top_p", 0.71),): [0.4, 0.3, 0.15, 0, 0],
        (("min_p", 0.3),): [0.4, 0.3, 0.15, 0, 0],
        (("top_k", 4),): [0.4, 0.3, 0.15, 0.1, 0],
        (("top_p", 0.95), ("min_p", 0.3), ("top_k", 2)): [0.4, 0.3, 0, 0, 0],
    }
    for options, expected in kept.items():
        result = chances(**dict(options))
        np.testing.assert_allclose(result, renormed(expected), rtol=1e-5, atol=0)


def test_filters_look_at_temperature_one():
    """At 3.0 the softened tail would pass a top-p that came after the temperature."""
    result = chances(temperature=3.0, top_p=0.6)
    expected = renormed([0.4 ** (1 / 3), 0.3 ** (1 / 3), 0, 0, 0])
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_off_values_change_nothing():
    for options in ({"top_p": 0.0}, {"top_p": 1.0}, {"min_p": 0.0}, {"top_k": 0}):
        assert (chances(**options) == chances()).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"temperature": 1.0, "top_k": 5}, "top_k is 5.*vocabulary of 5"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(DFlash2Error, match=message):
        chances(**options)


@pytest.mark.parametrize("accepted", range(4))
def test_greedy_keeps_the_prefix_the_target_agrees_with(accepted):
    drafted = torch.tensor([3, 1, 2])
    chosen = [3, 1, 2, 4]
    chosen[accepted] = 0 if accepted < 3 else 4
    logits = torch.nn.functional.one_hot(torch.tensor(chosen), 5).float()
    verdict = accept_greedy(drafted, logits)
    assert (verdict.accepted, verdict.bonus) == (accepted, chosen[accepted])


def proposal_of(tokens, candidates, q) -> Proposal:
    return Proposal(torch.tensor(tokens), torch.tensor(candidates), torch.tensor(q))


def test_a_token_the_target_never_gives_is_never_kept():
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        proposal = proposal_of([2], [[2, 0]], [[0.9, 0.1]])
        verdict = accept_sampled(proposal, p, generator)
        assert verdict.accepted == 0
        assert verdict.bonus in (0, 1)


def test_equal_distributions_always_accept():
    p = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        proposal = proposal_of([0], [[1, 0]], [[0.75, 0.25]])
        verdict = accept_sampled(proposal, p, generator)
        assert (verdict.accepted, verdict.bonus) == (1, 0)


@pytest.mark.parametrize("one_hot", [False, True])
def test_the_emitted_token_follows_the_target(one_hot):
    """4,000 draws from five tokens, q over three of them and far from p."""
    generator = torch.Generator().manual_seed(1)
    p = torch.tensor([[0.4, 0.3, 0.15, 0.1, 0.05]] * 2)
    candidates, q = [4, 0, 2], [0.5, 0.3, 0.2]
    counts = np.zeros(5)
    for _ in range(4000):
        slot = int(torch.multinomial(torch.tensor(q), 1, generator=generator))
        chances = [float(index == slot) for index in range(3)] if one_hot else q
        proposal = proposal_of([candidates[slot]], [candidates], [chances])
        verdict = accept_sampled(proposal, p, generator)
        token = candidates[slot] if verdict.accepted else verdict.bonus
        counts[token] += 1
    expected = 4000 * p[0].numpy()
    assert ((counts - expected) ** 2 / expected).sum() < 23.5  # df 4 at 0.0001


def test_a_cycle_uses_the_generator_alike_whatever_is_kept():
    q = [[1.0, 0.0]] * 3
    states = []
    for tokens in ([0, 0, 0], [1, 1, 1]):
        generator = torch.Generator().manual_seed(0)
        p = torch.tensor([[1.0, 0.0]] * 4)
        accept_sampled(proposal_of(tokens, [[0, 1]] * 3, q), p, generator)
        states.append(generator.get_state())
    assert torch.equal(*states)
