"""Every term of the loss against its definition, slot by slot, in plain Python."""

import dataclasses
import math

import pytest
from tiny import assert_close, drafter_config

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from train_tiny import row_of, setting  # noqa: E402

from mlx_dflash2.errors import DFlash2Error  # noqa: E402
from mlx_dflash2.torch.train.losses import Criterion  # noqa: E402
from mlx_dflash2.torch.train.objective import TERMS, Objective  # noqa: E402
from mlx_dflash2.torch.train.slots import dpace_weights, slot_weights  # noqa: E402

ALPHA, GAMMA = 0.3, 3.0
NOTHING = dict.fromkeys(TERMS, 0.0)
EVERYTHING = Objective(
    **(NOTHING | {"ce": 0.3, "kl": 0.5, "tv": 0.7, "nla": 0.2, "lk": 0.4}),
    gamma=GAMMA,
)
FAMILIES = ["dflash", "dflash2", "dspark"]
MIXES = {
    "dflash": EVERYTHING,
    "dflash2": dataclasses.replace(EVERYTHING, selector_ce=1.1, selector_tv=0.9),
    "dspark": dataclasses.replace(EVERYTHING, confidence=1.3),
}


def only(*terms: str, **options) -> Objective:
    return Objective(**(NOTHING | dict.fromkeys(terms, 1.0)), **options)


def report_of(case, objective, hidden=None, **options):
    criterion = Criterion(case.drafter, case.target, objective, **options)
    hidden = case.rows() if hidden is None else hidden
    return criterion(hidden, case.captured.last, case.blocks)


def likely(family: str, **changes):
    """A setting whose labels are the drafter's first to sixth choices, in turn.

    So that some are hit, some are among the four candidates, and some are neither.
    """
    case = setting(family=family, **changes)
    hidden = case.rows().detach()
    logits = case.drafter.logits(hidden, case.target)
    if family == "dspark":
        head = case.drafter.markov_head
        logits += head.markov_w2(head.markov_w1(case.blocks.previous)).detach()
    choice = torch.arange(case.blocks.labels.numel()).view_as(case.blocks.labels) % 6
    ranked = logits.argsort(dim=-1, descending=True)
    labels = ranked.gather(-1, choice[..., None])[..., 0]
    blocks = dataclasses.replace(case.blocks, labels=labels)
    return dataclasses.replace(case, blocks=blocks)


def slots_of(case):
    """Place, drafter's row, target's row, token before and label of valid slots."""
    hidden, blocks = case.rows().detach(), case.blocks
    for row, block, g in blocks.valid.nonzero().tolist():
        at = int(blocks.anchors[row, block]) + g
        yield (
            (row, block, g),
            hidden[row, block, g],
            case.captured.last[row, at],
            int(case.batch.tokens[row, at]),
            int(blocks.labels[row, block, g]),
        )


def slow_losses(case, tokens=range(256)) -> dict[tuple, dict[str, float]]:
    """Every term of every valid slot, one by one, as if all said only `tokens`."""
    drafter, found = case.drafter, {}
    kind, kept = drafter.config.kind, list(tokens)
    for place, row, last, before, label in slots_of(case):
        logits = drafter.logits(row, case.target)
        if kind == "dspark":
            seen = drafter.markov_head.markov_w1(torch.tensor(before))
            logits = logits + drafter.markov_head.markov_w2(seen)
        q = softmax(logits, kept)
        p = softmax(case.target.head(last), kept)
        overlap = sum(min(p[token], q[token]) for token in kept)
        kl = sum(p[token] * math.log(p[token] / q[token]) for token in kept)
        share = math.exp(-3 * overlap)
        found[place] = {
            "ce": -math.log(q[label]),
            "kl": kl,
            "tv": sum(abs(p[token] - q[token]) for token in kept) / 2,
            "nla": -math.log(overlap),
            "lk": share * kl + (1 - share) * (1 - overlap),
            "overlap": overlap,
            "hits": max(q, key=q.get) == label,
        }
        if kind == "dspark":
            stated = drafter.confidence(row, seen).item()
            chance = overlap * math.log(stated) + (1 - overlap) * math.log(1 - stated)
            found[place] |= {"confidence": -chance, "stated": stated}
        if kind == "dflash2":
            best = sorted(kept, key=lambda token: -logits[token])[:4]
            found[place] |= slow_selector(drafter, row, logits, p, best, before, label)
    return found


def slow_selector(drafter, row, logits, p, best, before, label) -> dict[str, float]:
    """The selector's terms; without losses where the label is no candidate."""
    selector = drafter.candidate_selector
    left = selector.predecessor_codebook[before] * selector.hidden_projection(row)
    scores = logits.clone()
    for token in best:
        scores[token] += left @ selector.successor_codebook[token]
    q, total = softmax(scores, best), sum(p[token] for token in best)
    found = {"recall": label in best, "selector": max(q, key=q.get) == label}
    if label in best:
        gaps = [abs(p[token] / total - q[token]) for token in best]
        found |= {"selector_ce": -math.log(q[label]), "selector_tv": sum(gaps) / 2}
    return found


def softmax(logits: torch.Tensor, tokens: list[int]) -> dict[int, float]:
    most = max(logits[token].item() for token in tokens)
    powers = {token: math.exp(logits[token].item() - most) for token in tokens}
    return {token: power / sum(powers.values()) for token, power in powers.items()}


def slow_mean(slow: dict, term: str, gamma: float = GAMMA) -> float:
    weights = {
        at: math.exp(-at[2] / gamma) for at, found in slow.items() if term in found
    }
    assert weights, term
    return sum(w * slow[at][term] for at, w in weights.items()) / sum(weights.values())


def gradients_of(case, objective, **options) -> dict[str, torch.Tensor]:
    """Of all parameters a loss reaches, by name."""
    case.drafter.zero_grad()
    report_of(case, objective, **options).loss(objective).backward()
    named = case.drafter.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_term_is_its_definition(family):
    case, objective = likely(family), MIXES[family]
    report, slow = report_of(case, objective), slow_losses(case)
    for term in objective.mix:
        mean = slow_mean(slow, term)
        assert report.mean(term).item() == pytest.approx(mean, rel=5e-4), term
    mixed = sum(w * slow_mean(slow, term) for term, w in objective.mix.items())
    assert report.loss(objective).item() == pytest.approx(mixed, rel=5e-4)
    assert report.loss(objective, 0.25).item() == pytest.approx(mixed / 4, rel=5e-4)


@pytest.mark.parametrize(
    "changes", [{"output_multiplier": 0.3}, {"final_logit_softcapping": 2.0}]
)
def test_logits_are_transformed_before_they_are_compared(changes):
    case = likely("dflash", **changes)
    report = report_of(case, only("ce", gamma=0.0))
    hidden, total = case.rows().detach(), 0.0
    for (row, block, g), *_, label in slots_of(case):
        logits = case.drafter.logits(hidden[row, block, g], case.target)
        logits = logits * changes.get("output_multiplier", 1.0)
        if cap := changes.get("final_logit_softcapping"):
            logits = cap * torch.tanh(logits / cap)
        total -= logits.log_softmax(-1)[label].item()
    assert report.totals["ce"].item() == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_a_loop(family):
    case = likely(family)
    counts, slow = report_of(case, MIXES[family]).counts, slow_losses(case)
    expected = {name: [0.0] * 7 for name in counts}
    for (row, block, g), found in slow.items():
        before = [slow[row, block, earlier] for earlier in range(g + 1)]
        expected["valid"][g] += 1
        expected["overlap"][g] += found["overlap"]
        for name in ("hits", "recall", "selector"):
            if name in found:
                expected[name][g] += found[name]
                expected[f"{name}_run"][g] += all(slot[name] for slot in before)
        if family == "dspark":
            expected["confidence"][g] += found["stated"]
    for name, numbers in expected.items():
        assert_close(counts[name], torch.tensor(numbers), 1e-3, what=name)
    assert counts["hits"].sum() > 0 and counts["valid"].sum() == len(slow)


@pytest.mark.parametrize("weighting", ["dpace", "dpace_p", "dpace_f"])
def test_dpace_weighs_by_what_drafting_on_is_worth(weighting):
    case = likely("dflash")
    objective = only("ce", weighting=weighting, alpha=ALPHA)
    slow, expected, weights = slow_losses(case), 0.0, {}
    for row, block, g in slow:
        run = [at for at in slow if at[:2] == (row, block)]  # slots 0, 1, ...
        smooth = [(1 - ALPHA) * math.exp(-slow[at]["ce"]) + ALPHA for at in run]
        products = [math.prod(smooth[: j + 1]) for j in range(len(run))]
        weights[row, block, g] = {
            "dpace": sum(products[g:]),
            "dpace_p": products[g],
            "dpace_f": sum(products[g:]) / products[g],
        }[weighting]
        expected += weights[row, block, g] * slow[row, block, g]["ce"]
    report = report_of(case, objective)
    assert report.mean("ce").item() == pytest.approx(expected / len(slow), rel=1e-4)
    assert report.weights["ce"].item() == len(slow)

    constant = torch.zeros(case.blocks.valid.shape)
    for place, weight in weights.items():
        constant[place] = weight / len(slow)
    log_q = case.drafter.logits(case.rows(), case.target).log_softmax(-1)
    case.drafter.zero_grad()
    found = log_q.gather(-1, case.blocks.labels[..., None])[..., 0]
    (-found * constant).sum().backward()
    by_hand = case.drafter.fc.weight.grad.clone()
    assert_close(gradients_of(case, objective)["fc.weight"], by_hand, 1e-4)


def test_dpace_stays_finite_where_no_label_is_likely():
    chance, valid = torch.full((1, 7), 1e-20), torch.ones(1, 7, dtype=torch.bool)
    for weighting, first in (("dpace", 0.0), ("dpace_p", 0.0), ("dpace_f", 1.0)):
        objective = only("ce", weighting=weighting, alpha=0.0)
        weights = dpace_weights(chance, valid, objective)
        assert_close(weights, torch.full((1, 7), first), 1e-6)


def test_slots_are_weighed_by_their_place():
    valid = torch.tensor([[True, True, True, False]])
    weights = slot_weights(only("ce", gamma=4.0), valid)
    assert_close(weights, [[1.0, math.exp(-0.25), math.exp(-0.5), 0.0]], 1e-6)
    for flat in (only("ce", gamma=0.0), only("ce", weighting="dpace")):
        assert slot_weights(flat, valid).tolist() == [[1.0, 1.0, 1.0, 0.0]]


def test_the_share_of_lk_is_held_constant():
    """One slot, so that the gradient is that of the mix with the share as a number."""
    case = setting(family="dflash", rows=[row_of(15)], anchors=[[13]])
    assert case.blocks.valid.sum() == 1
    share = math.exp(-3 * slow_losses(case)[0, 0, 0]["overlap"])
    mixed = Objective(**(NOTHING | {"kl": share, "tv": 1 - share}))
    ours, theirs = gradients_of(case, only("lk")), gradients_of(case, mixed)
    assert_close(ours["fc.weight"], theirs["fc.weight"], 1e-5)


def test_the_confidence_learns_from_acceptance_and_leaves_it_alone():
    found = gradients_of(likely("dspark"), only("confidence"))
    assert "markov_head.markov_w2.weight" not in found  # only acceptance depends on it
    assert found["confidence_head.proj.weight"].abs().max() > 0


@pytest.mark.parametrize("term", ["selector_ce", "selector_tv"])
def test_detached_selector_terms_train_the_selector_only(term):
    case = likely("dflash2")
    joint = gradients_of(case, only(term))
    alone = gradients_of(case, only(term, detach_selector=True))
    own = {name for name in joint if name.startswith("candidate_selector.")}
    assert len(own) == 3 and alone.keys() == own
    assert {"fc.weight", "layers.0.mlp.up_proj.weight"} <= joint.keys()
    for name in own:
        assert alone[name].abs().max() > 0
        assert torch.equal(alone[name], joint[name])


def test_without_a_selector_term_the_selector_is_counted_but_not_trained():
    case = likely("dflash2")
    found = gradients_of(case, only("ce"))
    assert not any(name.startswith("candidate_selector.") for name in found)
    assert report_of(case, only("ce")).counts["recall"].sum() > 0


def test_a_missing_label_is_no_slot_of_the_selector():
    """Sixth choices alone: nothing counts, and the gradient is zero, not NaN."""
    case = likely("dflash2")
    logits = case.drafter.logits(case.rows().detach(), case.target)
    labels = logits.argsort(dim=-1, descending=True)[..., 5]
    case = dataclasses.replace(
        case, blocks=dataclasses.replace(case.blocks, labels=labels)
    )
    report = report_of(case, only("selector_ce", "selector_tv"))
    assert report.weights["selector_ce"].item() == 0
    assert report.mean("selector_tv").item() == 0
    for gradient in gradients_of(case, only("selector_ce", "selector_tv")).values():
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 3])
def test_the_chunk_changes_neither_value_nor_gradient(family, chunk):
    case, objective = likely(family), MIXES[family]
    whole, parts = (report_of(case, objective, chunk=size) for size in (99, chunk))
    for term in objective.mix:
        assert_close(parts.mean(term).detach(), whole.mean(term).detach(), 1e-4)
    for name, count in whole.counts.items():
        assert_close(parts.counts[name], count, 1e-4, what=name)
    expected = gradients_of(case, objective, chunk=99)
    found = gradients_of(case, objective, chunk=chunk)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, 1e-4, what=name)


def test_no_more_logits_exist_than_a_chunk_has(monkeypatch):
    case = setting()
    shapes = []
    logits = case.drafter.logits

    def listen(hidden, target):
        shapes.append(tuple(hidden.shape[:2]))
        return logits(hidden, target)

    monkeypatch.setattr(case.drafter, "logits", listen)
    report = report_of(case, only("ce"), chunk=3)
    assert shapes == [(3, 7), (3, 7), (2, 7)]
    report.loss(only("ce")).backward()
    assert sorted(shapes[3:]) == [(2, 7), (3, 7), (3, 7)]


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_blocks_add_nothing_and_all_gradients_are_finite(family):
    """Both rows at once, the second padded, against each alone."""
    case, objective = setting(family=family), MIXES[family]
    assert not case.blocks.real.all()
    both = report_of(case, objective)
    gradients = gradients_of(case, objective)
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    rows, anchors = [row_of(30, seed=1)], [[3, 4, 13, 20, 27]]
    first = setting(family=family, rows=rows, anchors=anchors)
    rows, anchors = [row_of(14, 9, seed=2)], [[5, 11, 18]]
    second = setting(family=family, rows=rows, anchors=anchors)
    summed = report_of(first, objective) + report_of(second, objective)
    for group in ("totals", "weights", "counts"):
        for name, value in getattr(both, group).items():
            apart = getattr(summed, group)[name].detach()
            assert_close(value.detach(), apart, 2e-3, what=f"{group} {name}")


def test_shares_of_several_batches_make_the_loss_of_one():
    objective = MIXES["dspark"]
    whole = setting(family="dspark")
    total = slot_weights(objective, whole.blocks.valid).sum()
    loss = 0.0
    for rows, anchors in (
        ([row_of(30, seed=1)], [[3, 4, 13, 20, 27]]),
        ([row_of(14, 9, seed=2)], [[5, 11, 18]]),
    ):
        part = setting(family="dspark", rows=rows, anchors=anchors)
        share = slot_weights(objective, part.blocks.valid).sum() / total
        loss += report_of(part, objective).loss(objective, share).item()
    expected = report_of(whole, objective).loss(objective).item()
    assert loss == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_without_any_block_has_a_loss_of_zero(family):
    case = setting(family=family, rows=[row_of(9)], anchors=[[]])
    assert report_of(case, MIXES[family]).loss(MIXES[family]).item() == 0
    for gradient in gradients_of(case, MIXES[family]).values():
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_vocabulary_that_has_every_token_changes_nothing(family):
    case, objective = likely(family), MIXES[family]
    everything = torch.arange(256)
    whole = report_of(case, objective)
    cut = report_of(case, objective, head_tokens=everything)
    for term in objective.mix:
        assert_close(cut.mean(term).detach(), whole.mean(term).detach(), 1e-4)
    expected = gradients_of(case, objective)
    found = gradients_of(case, objective, head_tokens=everything)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, 1e-4, what=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_vocabulary_renormalises_drafter_and_target(family):
    case, objective = likely(family), MIXES[family]
    frequent = torch.arange(60, 90)
    labels = case.blocks.labels[case.blocks.valid].tolist()
    slow = slow_losses(case, sorted({*frequent.tolist(), *labels}))
    report = report_of(case, objective, head_tokens=frequent, chunk=2)
    for term in objective.mix:
        mean = slow_mean(slow, term)
        assert report.mean(term).item() == pytest.approx(mean, rel=5e-4), term


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_float32_under_autocast(family):
    case, objective = likely(family), MIXES[family]
    exact = report_of(case, objective)
    with torch.autocast("cpu", torch.bfloat16):
        report = report_of(case, objective, chunk=2)
        loss = report.loss(objective)
    assert loss.dtype == torch.float32
    assert {total.dtype for total in report.totals.values()} == {torch.float32}
    assert_close(report.mean("ce").detach(), exact.mean("ce").detach(), 0.5)
    loss.backward()
    assert case.drafter.fc.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("dflash", {"selector_ce": 1.0}, "a DFlash drafter has no selector"),
        ("dspark", {"selector_tv": 1.0}, "a DSpark drafter has no selector"),
        ("dflash2", {"confidence": 1.0}, "has no confidence head"),
        ("dflash", {"ce": 0.0}, "every one of ce, kl"),
        ("dflash", {"kl": -1.0}, "kl is -1.0, expected 0 or more"),
        ("dflash", {"gamma": -1.0}, "gamma is -1.0"),
        ("dflash", {"alpha": 1.5}, "alpha is 1.5, expected 0 to 1"),
        ("dflash", {"weighting": "none"}, "weighting is 'none', expected decay or"),
    ],
)
def test_what_a_drafter_cannot_learn_is_refused(family, changes, message):
    with pytest.raises(DFlash2Error, match=message):
        Objective(**changes).check(drafter_config(family=family))


def test_a_confidence_term_needs_the_head():
    config = drafter_config(family="dspark", enable_confidence_head=False)
    with pytest.raises(
        DFlash2Error, match="confidence is 1.0, but this drafter has no"
    ):
        only("confidence").check(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_term_may_be_left_out(family):
    config = drafter_config(family=family)
    case = setting(family=family)
    for term in MIXES[family].mix:
        objective = dataclasses.replace(MIXES[family], **{term: 0.0})
        objective.check(config)
        assert term not in report_of(case, objective).totals
        only(term).check(config)
        assert report_of(case, only(term)).totals.keys() == {term}
