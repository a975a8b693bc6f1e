"""The torch target: taps, rollback, logits."""

import pytest
from tiny import TARGET, assert_close, torch_target

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

IDS = torch.tensor([[5, 9, 200, 31, 7, 7, 64, 12, 90]])


@pytest.fixture(scope="module")
def target():
    return torch_target()


def test_a_tap_is_the_output_of_its_layer(target):
    outputs = {}
    hooks = [
        layer.register_forward_hook(
            lambda module, args, output, index=index: outputs.update({index: output})
        )
        for index, layer in enumerate(target.model.model.layers)
    ]
    _, features = target.forward(IDS, target.make_cache(), taps=(2, 0, 1))
    for hook in hooks:
        hook.remove()
    expected = torch.cat([outputs[2], outputs[0], outputs[1]], dim=-1)
    assert torch.equal(features, expected)


def test_tapping_leaves_the_logits_as_they_are(target):
    plain, nothing = target.forward(IDS, target.make_cache())
    tapped, _ = target.forward(IDS, target.make_cache(), taps=(0, 2))
    assert nothing is None
    assert torch.equal(plain, tapped)
    assert_close(plain, target.model(IDS).logits, 1e-5)


def test_the_last_layer_cannot_be_tapped(target):
    with pytest.raises(ValueError, match="taps"):
        target.forward(IDS, taps=(3,))


@pytest.mark.parametrize("kept", range(3, 10))
def test_a_rolled_back_cache_equals_one_never_filled(target, kept):
    cache, fresh = target.make_cache(), target.make_cache()
    target.forward(IDS[:, :3], cache)
    target.forward(IDS[:, 3:], cache)
    target.roll_back(cache, kept)
    target.forward(IDS[:, :kept], fresh)
    assert cache.get_seq_length() == kept
    after = torch.tensor([[77, 8]])
    again, features = target.forward(after, cache, taps=(1,))
    straight, expected = target.forward(after, fresh, taps=(1,))
    assert_close(again, straight, 2e-5)
    assert_close(features, expected, 2e-5)


def test_rolling_back_forward_is_refused(target):
    cache = target.make_cache()
    target.forward(IDS, cache)
    with pytest.raises(ValueError, match="1 positions short of 10"):
        target.roll_back(cache, 10)


def test_only_the_last_logits_may_be_asked_for(target):
    logits, features = target.forward(IDS, taps=(0,), logits_to_keep=1)
    whole, _ = target.forward(IDS)
    assert logits.shape == (1, 1, 256) and features.shape == (1, 9, 64)
    assert_close(logits[0, 0], whole[0, -1], 1e-5)


def test_embedding_and_head_are_the_models():
    for tied in (False, True):
        target = torch_target(TARGET | {"tie_word_embeddings": tied})
        hidden = target.model.model(IDS).last_hidden_state
        assert torch.equal(target.head(hidden), target.model(IDS).logits)
        embedding = target.model.model.embed_tokens.weight
        assert torch.equal(target.embed(IDS), embedding[IDS])


def test_the_target_is_frozen(target):
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training


def test_every_end_of_sequence_token_is_known(target):
    assert target.eos_token_ids == {1, 2}
    single = torch_target(TARGET | {"eos_token_id": 9})
    assert single.eos_token_ids == {9}
