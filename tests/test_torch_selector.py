"""The torch selector: which candidates, which scores, which path."""

import itertools

import numpy as np
import pytest
from tiny import assert_close, drafter_config, drafter_numbers, torch_drafter

torch = pytest.importorskip("torch")
torch.set_num_threads(1)


def selector_of(config, dtype=torch.float32):
    drafter = torch_drafter(config, drafter_numbers(config))
    return drafter.candidate_selector.to(dtype)


def inputs(rows: int = 7, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 64, generator=generator)
    return hidden, 3 * torch.randn(rows, 256, generator=generator)


def test_equal_logits_are_ordered_by_id():
    selector = selector_of(drafter_config())
    logits = torch.zeros(2, 256)
    logits[1, [200, 17, 90]] = 1.0
    ids, _ = selector.candidates(logits)
    assert ids.tolist() == [[0, 1, 2, 3], [17, 90, 200, 0]]


def test_candidates_are_taken_before_the_softcap_flattens_them():
    config = drafter_config(final_logit_softcapping=5.0, output_multiplier=0.3)
    selector = selector_of(config)
    logits = torch.arange(256).float().flip(0)[None] + 1000  # all saturate the cap
    ids, unary = selector.candidates(logits)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert unary.tolist() == [[5.0] * 4]


def test_multiplier_comes_before_the_cap():
    from mlx_dflash2.torch.proposal import transform_logits

    config = drafter_config(final_logit_softcapping=5.0, output_multiplier=0.3)
    logits = torch.tensor([-40.0, -1.0, 0.0, 2.0, 30.0])
    expected = 5 * np.tanh(logits.numpy() * 0.3 / 5)
    assert_close(transform_logits(logits, config), expected, 1e-6)


def test_without_a_cap_logits_are_only_scaled():
    from mlx_dflash2.torch.proposal import transform_logits

    logits = torch.tensor([-40.0, 3.0])
    assert torch.equal(transform_logits(logits, drafter_config()), logits)


def test_walk_takes_the_best_candidate_after_the_one_before():
    selector = selector_of(drafter_config())
    hidden, logits = inputs()
    proposal = selector.walk(hidden, logits, 11)
    before = selector.predecessor_codebook.numpy()
    after = selector.successor_codebook.numpy()
    weights = hidden.numpy() @ selector.hidden_projection.weight.numpy().T
    previous, expected = 11, []
    for row in range(7):
        ids = np.argsort(-logits[row].numpy(), kind="stable")[:4]
        pair = (before[previous] * weights[row] * after[ids]).sum(-1)
        previous = int(ids[np.argmax(logits[row].numpy()[ids] + pair)])
        expected.append(previous)
    assert proposal.tokens.tolist() == expected
    assert proposal.candidates.shape == (7, 4)


def test_codebooks_are_not_interchangeable():
    selector = selector_of(drafter_config())
    hidden, logits = inputs()
    paths = [selector.walk(hidden, logits, anchor).tokens.tolist() for anchor in (3, 9)]
    before, after = selector.predecessor_codebook, selector.successor_codebook
    selector.predecessor_codebook, selector.successor_codebook = after, before
    swapped = [selector.walk(hidden, logits, a).tokens.tolist() for a in (3, 9)]
    assert all(a != b for a, b in zip(paths, swapped, strict=True))


def test_a_greedy_proposal_is_certain_of_its_tokens():
    selector = selector_of(drafter_config())
    proposal = selector.walk(*inputs(), 11)
    chosen = (proposal.candidates == proposal.tokens[:, None]).float()
    assert torch.equal(proposal.probabilities, chosen)


def test_candidates_a_twentieth_apart_are_told_apart_in_bfloat16():
    """Around 20 a bfloat16 step is 0.125; the sum must be made in float32."""
    selector = selector_of(drafter_config(), torch.bfloat16)
    selector.predecessor_codebook.zero_()
    selector.successor_codebook.zero_()
    selector.predecessor_codebook[0, 0] = 1.0
    selector.hidden_projection.weight.zero_()
    selector.hidden_projection.weight[0, 0] = 1.0
    selector.successor_codebook[[5, 9], 0] = torch.tensor(
        [0.0, 0.05], dtype=torch.bfloat16
    )
    hidden = torch.zeros(1, 64, dtype=torch.bfloat16)
    hidden[0, 0] = 1.0
    logits = torch.zeros(1, 256, dtype=torch.bfloat16)
    logits[0, [5, 9]] = 20.0
    assert selector.walk(hidden, logits, 0).tokens.tolist() == [9]


def test_sampled_q_is_the_softmax_of_the_scores_along_the_drawn_path():
    selector = selector_of(drafter_config())
    hidden, logits = inputs()
    generator = torch.Generator().manual_seed(3)
    proposal = selector.walk(hidden, logits, 11, temperature=1.5, generator=generator)
    candidates, unary = selector.candidates(logits)
    projected = selector.hidden_projection(hidden)
    path = [11, *proposal.tokens.tolist()]
    for row, previous in enumerate(path[:-1]):
        scores = selector.scores(
            projected[row], unary[row], candidates[row], torch.tensor(previous)
        )
        assert_close(proposal.probabilities[row], torch.softmax(scores / 1.5, 0), 1e-6)
        assert proposal.tokens[row] in candidates[row]


def test_paths_are_drawn_as_often_as_q_says():
    """Two rows of four candidates: sixteen paths, 4,000 draws."""
    selector = selector_of(drafter_config())
    hidden, logits = inputs(rows=2)
    candidates, unary = selector.candidates(logits / 3)
    projected = selector.hidden_projection(hidden)
    anchor = torch.tensor(11)
    first = torch.softmax(
        selector.scores(projected[0], unary[0], candidates[0], anchor) / 3, 0
    )
    expected = {}
    for a, b in itertools.product(range(4), repeat=2):
        second = selector.scores(
            projected[1], unary[1], candidates[1], candidates[0, a]
        )
        chance = first[a] * torch.softmax(second / 3, 0)[b]
        expected[int(candidates[0, a]), int(candidates[1, b])] = float(chance)
    generator = torch.Generator().manual_seed(0)
    counts = dict.fromkeys(expected, 0)
    for _ in range(4000):
        proposal = selector.walk(
            hidden, logits / 3, 11, temperature=3.0, generator=generator
        )
        counts[tuple(proposal.tokens.tolist())] += 1
    squares = sum(
        (counts[path] - 4000 * p) ** 2 / (4000 * p) for path, p in expected.items()
    )
    assert squares < 44.3  # chi-square of 15 degrees at 0.0001


def test_the_first_tokens_of_a_proposal_are_a_proposal():
    selector = selector_of(drafter_config())
    proposal = selector.walk(*inputs(), 11)
    cut = proposal.first(3)
    assert cut.tokens.tolist() == proposal.tokens.tolist()[:3]
    assert cut.candidates.shape == cut.probabilities.shape == (3, 4)
