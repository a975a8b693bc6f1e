"""Candidates, scores and paths of both backends."""

import mlx.core as mx
import numpy as np
import pytest
from tiny import (
    assert_close,
    drafter_config,
    drafter_numbers,
    mlx_drafter,
    torch_drafter,
)

from mlx_dflash2.selector import top_candidates

torch = pytest.importorskip("torch")
torch.set_num_threads(1)


def both(config):
    numbers = drafter_numbers(config)
    reference, ours = torch_drafter(config, numbers), mlx_drafter(config, numbers)
    return reference.candidate_selector, ours.candidate_selector


@pytest.mark.parametrize("vocab", [5, 127, 128, 129, 600, 4096])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("levels", [1, 3, None], ids=["equal", "three", "distinct"])
def test_candidates_agree_in_order_whatever_ties(vocab, count, levels):
    generator = np.random.default_rng(vocab)
    logits = generator.standard_normal((7, vocab)).astype(np.float32)
    if levels is not None:
        logits = generator.integers(0, levels, (7, vocab)).astype(np.float32) - 1
    config = drafter_config(vocab_size=vocab, mask_token_id=0, selector_top_k=count)
    reference, _ = both(config)
    expected, unary = reference.candidates(torch.from_numpy(logits))
    ids, values = top_candidates(mx.array(logits), count)
    assert np.array(ids).tolist() == expected.tolist()
    assert np.array(values).tolist() == unary.tolist()


def test_candidates_agree_on_zeros_of_both_signs_and_infinities():
    row = np.array([0.0, -0.0, -np.inf, 0.0, np.inf, -1.0, -np.inf], np.float32)
    config = drafter_config(vocab_size=7, mask_token_id=0, selector_top_k=7)
    reference, _ = both(config)
    expected, _ = reference.candidates(torch.from_numpy(row)[None])
    ids, _ = top_candidates(mx.array(row)[None], 7)
    assert np.array(ids).tolist() == expected.tolist() == [[4, 0, 1, 3, 5, 2, 6]]


@pytest.mark.parametrize("seed", range(8))
def test_greedy_paths_are_identical(seed):
    reference, ours = both(drafter_config(selector_top_k=16))
    generator = np.random.default_rng(seed)
    hidden = generator.standard_normal((7, 64)).astype(np.float32)
    logits = 3 * generator.standard_normal((7, 256)).astype(np.float32)
    expected = reference.walk(torch.from_numpy(hidden), torch.from_numpy(logits), 11)
    candidates, unary = top_candidates(mx.array(logits), 16)
    found = ours.propose(
        mx.array(hidden),
        mx.array([11]),
        candidates,
        unary,
        temperature=0.0,
        key=None,
    )
    assert np.array(found.tokens).tolist() == expected.tokens.tolist()
    assert np.array(found.candidates).tolist() == expected.candidates.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_q_along_a_drawn_path_is_what_the_reference_computes(seed):
    reference, ours = both(drafter_config())
    generator = np.random.default_rng(seed)
    hidden = generator.standard_normal((7, 64)).astype(np.float32)
    logits = 3 * generator.standard_normal((7, 256)).astype(np.float32)
    candidates, unary = top_candidates(mx.array(logits), 4)
    found = ours.propose(
        mx.array(hidden),
        mx.array([11]),
        candidates,
        unary,
        temperature=1.5,
        key=mx.random.key(seed),
    )
    ids, expected_unary = reference.candidates(torch.from_numpy(logits))
    projected = reference.hidden_projection(torch.from_numpy(hidden))
    path = [11, *np.array(found.tokens).tolist()]
    for row, previous in enumerate(path[:-1]):
        scores = reference.scores(
            projected[row], expected_unary[row], ids[row], torch.tensor(previous)
        )
        q = torch.softmax(scores / 1.5, 0)
        assert_close(found.probabilities[row], q, 1e-5, what=f"row {row}")
