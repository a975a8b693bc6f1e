"""Every objective learns to draft what a small target writes in a toy language."""

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from toy_language import HALF, OBJECTIVES, WHOLE, Toy  # noqa: E402

from mlx_dflash2.data.rows import RowSet  # noqa: E402

RUN = 24  # tokens, three blocks


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    return Toy.write(tmp_path_factory.mktemp("half"), HALF)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Toy.write(tmp_path_factory.mktemp("whole"), WHOLE)


def assert_learned(toy, out, objective):
    """Held-out acceptance length is above 3 of 8, and what training made of it."""
    found = toy.trained(out, objective)
    length = found["acceptance_length"]
    assert length > 3
    assert length - 1 >= 3 * (toy.untrained(objective) - 1)
    if "unary_acceptance_length" in found:
        assert length >= found["unary_acceptance_length"]
    if "confidence_bias" in found:
        assert abs(found["confidence_bias"]) < 0.1


def runs(data, side):
    """Every stretch of RUN tokens in the answers of some rows."""
    for row in RowSet(data / side):
        answer = row.tokens[row.supervised].tolist()
        for start in range(len(answer) - RUN + 1):
            yield tuple(answer[start : start + RUN])


def test_dflash_2_learns_at_half_size(half, tmp_path):
    assert_learned(half, tmp_path / "run", "DFlash 2")


def test_held_out_answers_are_not_those_of_training(half):
    known = set(runs(half.data, "train"))
    held_out = list(runs(half.data, "held_out"))
    assert sum(run in known for run in held_out) < 0.05 * len(held_out)


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_learns(whole, tmp_path, objective):
    assert_learned(whole, tmp_path / "run", objective)
