"""What is measured on held-out rows is what decoding does."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from train_runs import answers, row_of  # noqa: E402
from train_tiny import setting  # noqa: E402

from mlx_dflash2.torch.loading import load_drafter, load_target  # noqa: E402
from mlx_dflash2.torch.proposal import Draws  # noqa: E402
from mlx_dflash2.torch.train.metrics import Evaluator, rates, walk  # noqa: E402
from mlx_dflash2.torch.train.objective import Objective  # noqa: E402
from mlx_dflash2.torch.train.paths import draft_paths  # noqa: E402
from mlx_dflash2.torch.train.precision import Precision  # noqa: E402
from mlx_dflash2.torch.train.report import LossReport  # noqa: E402
from mlx_dflash2.torch.train.world import World  # noqa: E402

CPU = torch.device("cpu")
FAMILIES = ["dflash2", "dflash", "dspark"]
TEACHER = {"dspark": Objective(tv=1.0, confidence=1.0)}


def measured(pair, rows, blocks_at_once=7):
    evaluator = Evaluator(
        load_drafter(pair.drafter),
        load_target(pair.target),
        TEACHER.get(pair.options.family, Objective()),
        Precision("fp32", CPU),
        World(CPU),
        blocks_at_once,
    )
    return evaluator(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_walk_is_real_decoding(pair, family):
    models = pair("oracle", family=family, partial=0.3)
    drafter = load_drafter(models.drafter)
    decoded = answers(models, 4, tokens=40, drafter=drafter)
    found = measured(models, [row_of(prompt, each.tokens) for prompt, each in decoded])
    stats = [each.stats for _, each in decoded]
    cycles = sum(each.cycles for each in stats)
    emitted = sum(sum(each.emitted_per_cycle) for each in stats)
    assert (found["cycles"], found["tokens"]) == (cycles, emitted)
    assert 1.5 < found["acceptance_length"] == emitted / cycles
    kept = [count for each in stats for count in each.accepted_per_cycle]
    for slot, share in enumerate(found["accepted_at"]):
        last = sum(count > slot for count in kept) / cycles
        # An answer cut by the budget hides what a last block would have drafted on.
        assert share == pytest.approx(last, abs=len(decoded) / cycles)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_paths_at_once_are_those_of_single_blocks(family):
    case = setting(family=family)
    hidden = case.rows().detach().flatten(0, 1)
    logits = case.drafter.logits(hidden, case.target).detach()
    anchors = case.blocks.previous[..., 0].flatten()
    paths = draft_paths(case.drafter, hidden, logits, anchors)
    for block, anchor in enumerate(anchors.tolist()):
        alone = case.drafter.decide(hidden[block], logits[block], anchor, Draws())
        assert alone.tokens.tolist() == paths[block].tolist()


def test_a_right_drafter_reaches_the_maximum(pair):
    models = pair("oracle", eos="off")
    rows = [row_of(p, each.tokens) for p, each in answers(models, 2, tokens=33)]
    found = measured(models, rows)
    assert found["acceptance_length"] == found["oracle_acceptance_length"] == 8.0
    assert found["accepted_at"] == [1.0] * 7 and found["recall"] == [1.0] * 7
    assert found["unary_acceptance_length"] < 8.0 and found["selector_lift"] > 0


def test_the_confidence_is_held_against_the_chance_of_acceptance(pair):
    models = pair("oracle", family="dspark", partial=0.3)
    rows = [row_of(p, each.tokens) for p, each in answers(models, 2, tokens=30)]
    found = measured(models, rows)
    assert abs(found["confidence_bias"]) < 0.1
    assert 0 < min(found["overlap"]) <= max(found["overlap"]) <= 1


def test_the_size_of_chunks_changes_nothing(pair):
    models = pair("oracle", partial=0.3)
    rows = [row_of(p, each.tokens) for p, each in answers(models, 2, tokens=30)]
    one, other = (measured(models, rows, blocks_at_once=count) for count in (3, 100))
    assert one["acceptance_length"] == other["acceptance_length"]
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def by_hand(spans, runs):
    """Cycles and emitted tokens, decoding each span (first, last) literally."""
    cycles = emitted = 0
    for first, last in spans:
        anchor = first
        while anchor < last:
            step = min(runs[anchor] + 1, last - anchor)
            cycles, emitted, anchor = cycles + 1, emitted + step, anchor + step
    return cycles, emitted


@pytest.mark.parametrize("seed", range(5))
def test_the_walk_goes_through_every_answer(seed):
    generator = np.random.default_rng(seed)
    spans = [(2, 9), (14, 14), (17, 30), (33, 34), (35, 41)]
    ends = {a: last for first, last in spans for a in range(first, last)}
    anchors = np.array(sorted(ends))
    runs = np.array([generator.integers(0, min(3, ends[a] - a) + 1) for a in anchors])
    sums = walk(anchors, runs, 3)
    lengths = dict(zip(anchors.tolist(), runs.tolist(), strict=True))
    assert tuple(sums[:2]) == by_hand(spans, lengths)
    assert sums[2:].tolist() == sorted(sums[2:], reverse=True)


def test_rates_are_of_sums_not_of_shares():
    counts = {
        "valid": torch.tensor([10.0, 5.0]),
        "hits": torch.tensor([5.0, 1.0]),
        "recall": torch.tensor([8.0, 4.0]),
        "selector": torch.tensor([6.0, 3.0]),
    }
    found = rates(LossReport({}, {}, counts))
    assert found["accuracy"] == [0.5, pytest.approx(0.2)]
    assert found["recall"] == pytest.approx([0.8, 0.8])
    assert found["selector_accuracy"] == pytest.approx(0.6)
    assert found["selector_lift"] == pytest.approx(0.2)


def test_rows_without_an_answer_count_nothing(pair):
    models = pair("oracle")
    (prompt, decoded), *_ = answers(models, 1, tokens=20)
    row = row_of(prompt, decoded.tokens)
    silent = dataclasses.replace(row, supervised=row.supervised & False)
    assert measured(models, [row, silent]) == measured(models, [row])
