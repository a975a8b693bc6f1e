"""The tapped target: transformers against mlx-lm, float32."""

import mlx.core as mx
import numpy as np
import pytest
from tiny import TARGET, assert_close, mlx_target, target_numbers, torch_target

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

SHALLOW = 5e-5
DEEP = 1e-3  # at position 1,500 an angle's rounding alone moves a value by 1e-4
TAPS = (2, 0)


@pytest.fixture(scope="module")
def targets():
    return torch_target(), mlx_target()


def prompt(length: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (1, length))


def run_both(targets, ids: np.ndarray, caches):
    """Logits and tapped features of both backends, as two pairs."""
    reference, ours = targets
    expected = reference.forward(torch.from_numpy(ids), caches[0], taps=TAPS)
    hidden, features = ours.forward(mx.array(ids), caches[1], TAPS)
    return expected, (ours.head(hidden), features)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 33])
def test_logits_and_taps(tied, rows):
    config = TARGET | {"tie_word_embeddings": tied}
    targets = torch_target(config), mlx_target(config)
    caches = [target.make_cache() for target in targets]
    expected, found = run_both(targets, prompt(rows), caches)
    assert_close(found[0], expected[0], SHALLOW, what="logits")
    assert_close(found[1], expected[1], SHALLOW, what="taps")


def test_both_roll_back_to_the_same_state(targets):
    caches = [target.make_cache() for target in targets]
    ids = prompt(40)
    run_both(targets, ids[:, :20], caches)
    length = 20
    for kept in (1, 8, 3, 1):
        run_both(targets, ids[:, length : length + 8], caches)
        length += kept
        for target, cache in zip(targets, caches, strict=True):
            target.roll_back(cache, length)
    after = prompt(3)
    expected, found = run_both(targets, after, caches)
    assert_close(found[0], expected[0], SHALLOW, what="logits")
    fresh = [target.make_cache() for target in targets]
    straight, _ = run_both(targets, np.concatenate([ids[:, :33], after], 1), fresh)
    assert_close(found[0], straight[0][:, 33:], SHALLOW, what="fresh logits")


def test_logits_and_taps_at_position_1500(targets):
    """Theta 5e6, a prompt in chunks, then a block's worth of rows."""
    ids = prompt(1508)
    caches = [target.make_cache() for target in targets]
    for start in range(0, 1500, 500):
        run_both(targets, ids[:, start : start + 500], caches)
    expected, found = run_both(targets, ids[:, 1500:], caches)
    assert_close(found[0], expected[0], DEEP, what="logits")
    assert_close(found[1], expected[1], DEEP, what="taps")
    best = np.array(mx.argmax(found[0], -1))
    assert best.tolist() == expected[0].argmax(-1).tolist()


def test_another_rope_base_would_show_at_that_position(targets):
    ids = torch.from_numpy(prompt(1508))
    right, _ = targets[0].forward(ids)
    wrong, _ = torch_target(TARGET | {"rope_theta": 1e4}).forward(ids)
    assert (right - wrong)[:, 1500:].abs().max() > 100 * DEEP


def test_embedding_and_head(targets):
    reference, ours = targets
    ids, numbers = prompt(5), target_numbers()
    embedded = numbers["model.embed_tokens.weight"][ids]
    assert (np.array(ours.embed(mx.array(ids))) == embedded).all()
    assert (reference.embed(torch.from_numpy(ids)).numpy() == embedded).all()
    expected = reference.head(torch.from_numpy(embedded))
    assert_close(ours.head(mx.array(embedded)), expected, SHALLOW)
