"""Blocks as training computes them are blocks as decoding computes them."""

import dataclasses

import pytest
from tiny import assert_close

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from train_tiny import documents_of, row_of, setting  # noqa: E402

from mlx_dflash2.torch.train.features import capture  # noqa: E402

KINDS = [
    (family, layers, causal)
    for family in ("dflash2", "dflash", "dspark")
    for layers, causal in (
        ("full", None),
        ("full", True),
        ("sliding", None),
        ("sliding", False),
        ("mixed", None),
    )
]
LOGITS = 1e-4  # largest gap in float32; a wrong mask or position gives gaps above 1


def serve(case, row: int, anchor: int, steps=(5, 1, 2, 1, 8, 3)) -> torch.Tensor:
    """Logits of the slots after `anchor`, decoding cycle by cycle up to it.

    Every cycle verifies rejected tokens too, and cuts cache and features to those kept.
    """
    drafter, target, batch = case.drafter, case.target, case.batch
    start = int(anchor - batch.positions[row, anchor])
    cache, context, done = target.make_cache(), drafter.make_context(), start
    with torch.no_grad():
        for kept in steps * 9:
            kept = min(kept, anchor - done)
            tokens = [*batch.tokens[row, done : done + kept].tolist(), 7, 7, 9]
            _, features = target.forward(
                torch.tensor([tokens]), cache, taps=drafter.config.target_layer_ids
            )
            done += kept
            target.roll_back(cache, done - start)
            drafter.extend(features[:, :kept], context)
            if done == anchor:
                break
        block = drafter.embed_block(int(batch.tokens[row, anchor]), target)
        rows = drafter.hidden(block, context)[0, drafter.config.first_row :]
        return drafter.logits(rows, target)


@pytest.mark.parametrize(("family", "layers", "causal"), KINDS)
def test_logits_are_those_of_decoding(family, layers, causal):
    case = setting(family=family, layers=layers, is_causal=causal)
    with torch.no_grad():
        logits = case.drafter.logits(case.rows(), case.target)
    for row, block in case.blocks.real.nonzero().tolist():
        anchor = int(case.blocks.anchors[row, block])
        served = serve(case, row, anchor)
        assert_close(
            logits[row, block], served, LOGITS, what=f"row {row}, anchor {anchor}"
        )


def test_the_embedding_scale_counts_in_training_too():
    case = setting(input_embedding_scale=1.7)
    with torch.no_grad():
        logits = case.drafter.logits(case.rows(), case.target)
    assert_close(logits[0, 2], serve(case, 0, 13), LOGITS)


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
def test_nothing_from_the_anchor_on_leaks_into_a_block(family):
    """But the anchor's own token, which decoding knows."""
    case = setting(family=family, rows=[row_of(30)], anchors=[[13, 20]])
    tokens, features = case.batch.tokens.clone(), case.captured.features.clone()
    tokens[0, 14:] = (tokens[0, 14:] + 1) % 256
    features[0, 13:] = torch.randn(features[0, 13:].shape)
    other = dataclasses.replace(
        case, batch=dataclasses.replace(case.batch, tokens=tokens)
    )
    with torch.no_grad():
        before, after = case.rows(), other.rows(features)
    assert torch.equal(before[0, 0], after[0, 0])
    assert not torch.equal(before[0, 1], after[0, 1])


def test_tokens_behind_the_anchor_leak_through_no_feature():
    case = setting(rows=[row_of(30)], anchors=[[13]])
    changed = row_of(30)
    changed.tokens[14:] = 5
    other = setting(rows=[changed], anchors=[[13]])
    with torch.no_grad():
        assert torch.equal(case.rows(), other.rows())


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
def test_the_row_before_the_anchor_is_used(family):
    case = setting(family=family, rows=[row_of(30)], anchors=[[13]])
    features = case.captured.features.clone()
    features[0, 12] += 1
    with torch.no_grad():
        gaps = (case.rows() - case.rows(features)).abs().amax(dim=(0, 1, 3))
    assert (gaps > 1e-3).all()


def test_the_anchors_token_is_used():
    case = setting(rows=[row_of(30)], anchors=[[13]])
    case.batch.tokens[0, 13] += 1
    features = capture(case.target, case.batch, (0, 2)).features
    assert torch.equal(features[:, :13], case.captured.features[:, :13])
    with torch.no_grad():
        after = case.rows()
        case.batch.tokens[0, 13] -= 1
        assert ((case.rows() - after).abs().amax(dim=(0, 1, 3)) > 1e-3).all()


@pytest.mark.parametrize("layers", ["full", "sliding"])
def test_a_packed_row_is_its_documents_apart(layers):
    row = row_of(18, 15)
    packed = setting(layers=layers, rows=[row], anchors=[[4, 10, 22, 30]])
    apart = setting(layers=layers, rows=documents_of(row), anchors=[[4, 10], [4, 12]])
    with torch.no_grad():
        together, alone = packed.rows(), apart.rows()
    assert_close(together[0], alone.flatten(0, 1), 2e-4)
    for name in ("labels", "previous", "valid"):
        ours, theirs = getattr(packed.blocks, name), getattr(apart.blocks, name)
        valid = packed.blocks.valid[0]
        assert torch.equal(ours[0][valid], theirs.flatten(0, 1)[valid])


def test_blocks_do_not_see_each_other():
    case = setting(rows=[row_of(30)], anchors=[[5, 13, 14]])
    alone = setting(rows=[row_of(30)], anchors=[[13]])
    with torch.no_grad():
        assert_close(case.rows()[0, 1], alone.rows()[0, 0], 2e-4)


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
def test_recomputing_layers_changes_no_gradient(family):
    case = setting(family=family)
    gradients = []
    for recompute in (False, True):
        case.drafter.zero_grad()
        case.rows(recompute=recompute).square().sum().backward()
        gradients.append([p.grad for p in case.drafter.layers.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert plain.abs().max() > 0
        assert torch.equal(plain, again)
