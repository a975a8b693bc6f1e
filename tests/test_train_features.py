"""What is captured of the target: taps, final rows, documents, padding."""

import pytest
from tiny import TARGET, assert_close, torch_target

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from train_tiny import documents_of, row_of  # noqa: E402

from mlx_dflash2.torch.train.batch import Batch  # noqa: E402
from mlx_dflash2.torch.train.features import capture, document_mask  # noqa: E402

TAPS = (2, 0)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def target(request):
    return torch_target(TARGET | {"tie_word_embeddings": request.param})


def test_features_are_those_decoding_reads(target):
    """In the order of the taps, and over a cache grown in steps and rolled back."""
    row = row_of(20)
    batch = Batch.of([row])
    captured = capture(target, batch, TAPS)
    cache, parts = target.make_cache(), []
    for start, end, rejected in ((0, 7, 0), (7, 8, 6), (8, 12, 2), (12, 20, 0)):
        tokens = torch.cat(
            [batch.tokens[:, start:end], torch.full((1, rejected), 9)], 1
        )
        _, features = target.forward(tokens, cache, taps=TAPS)
        target.roll_back(cache, end)
        parts.append(features[:, : end - start])
    assert_close(captured.features, torch.cat(parts, dim=1), 1e-4)


def test_the_head_makes_the_targets_logits_of_the_last_rows(target):
    batch = Batch.of([row_of(20)])
    captured = capture(target, batch, TAPS)
    logits, _ = target.forward(batch.tokens)
    assert_close(target.head(captured.last), logits, 1e-4)


def test_packed_documents_are_as_if_alone(target):
    row = row_of(12, 7, 9)
    packed = capture(target, Batch.of([row]), TAPS)
    parts = [capture(target, Batch.of([one]), TAPS) for one in documents_of(row)]
    for name in ("features", "last"):
        alone = torch.cat([getattr(part, name) for part in parts], dim=1)
        assert_close(getattr(packed, name), alone, 1e-4, what=name)


@pytest.mark.parametrize("longest", [(25,), (10, 15)], ids=["whole", "packed"])
def test_padding_changes_nothing(target, longest):
    row = row_of(11)
    alone = capture(target, Batch.of([row]), TAPS)
    padded = capture(target, Batch.of([row_of(*longest, seed=1), row]), TAPS)
    assert_close(padded.features[1:, :11], alone.features, 1e-4)
    assert_close(padded.last[1:, :11], alone.last, 1e-4)
    assert padded.features.isfinite().all() and padded.last.isfinite().all()


def test_a_later_token_changes_no_earlier_feature(target):
    batch = Batch.of([row_of(12, 8)])
    before = capture(target, batch, TAPS).features
    batch.tokens[0, 9] += 1
    after = capture(target, batch, TAPS).features
    changed = (before != after).any(-1)[0].nonzero().flatten().tolist()
    assert changed == [9, 10, 11]


def test_a_mask_is_made_for_packed_rows_only(target, monkeypatch):
    masks = []
    trunk = target.trunk

    def listen(*arguments, mask, **options):
        masks.append(mask)
        return trunk(*arguments, mask=mask, **options)

    monkeypatch.setattr(target, "trunk", listen)
    capture(target, Batch.of([row_of(9), row_of(5)]), TAPS)
    batch = Batch.of([row_of(9), row_of(4, 3)])
    capture(target, batch, TAPS)
    assert masks[0] is None
    assert torch.equal(masks[1], document_mask(batch.document)[:, None])


def test_nothing_captured_carries_a_gradient(target):
    captured = capture(target, Batch.of([row_of(9)]), TAPS)
    assert not captured.features.requires_grad and not captured.last.requires_grad


def test_the_last_layer_cannot_be_captured(target):
    with pytest.raises(ValueError, match="taps"):
        capture(target, Batch.of([row_of(9)]), (0, 3))
