"""The test material itself: oracle pairs do what the paper says."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step
from pair_files import EOS2, MASK
from pairs import PairOptions, write_pair
from transformers import AutoTokenizer

from mlx_dflash2.checkpoint import stored_tensors
from mlx_dflash2.families import read_drafter_config
from mlx_dflash2.names import check_tensors, published_names


def greedy(folder, prompt, count, ends=frozenset()):
    model, _ = load(str(folder))
    tokens = []
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=count):
        tokens.append(int(token))
        if tokens[-1] in ends:
            break
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "seed": 3},
        {"tied": True, "hidden": 160},
        {"rope_theta": 5e6, "partial": 0.3},
        {"family": "dspark"},
        {"family": "dflash", "partial": 0.3},
        {"family": "dflash", "lag": 2, "seed": 2},
    ],
    ids=["plain", "bfloat16", "tied", "theta", "dspark", "dflash", "lag"],
)
@pytest.mark.parametrize("length", [9, 40, 300])
def test_mlx_lm_decodes_the_walk_on_paper(pair, options, length):
    made = pair(**options)
    prompt = made.oracle.prompt(length)
    walk = made.oracle.walk(prompt, 64)
    assert greedy(made.target, prompt, 64, made.oracle.ends) == walk


def test_a_walk_ends_on_an_end_of_sequence_id(pair):
    oracle = pair().oracle
    walk = oracle.walk(oracle.prompt(40), 2000)
    assert len(walk) < 2000
    assert walk[-1] in oracle.ends
    assert not oracle.ends & set(walk[:-1])


def test_with_eos_off_a_walk_goes_round_the_ring(pair):
    oracle = pair(eos="off").oracle
    assert len(oracle.walk(oracle.prompt(40), 2000)) == 2000


def test_accepted_counts_are_full_blocks_within_the_budget(pair):
    oracle = pair(eos="off").oracle
    prompt = oracle.prompt(40)
    assert oracle.cycles(prompt, 17) == [7, 7]
    assert oracle.cycles(prompt, 18) == [7, 7, 0]
    assert oracle.cycles(prompt, 20) == [7, 7, 2]
    assert oracle.cycles(prompt, 9, width=3) == [3, 3]
    assert oracle.cycles(prompt, 1) == []


def test_a_bad_predecessor_ends_the_accepted_run(pair):
    oracle = pair(eos="off", partial=0.3).oracle
    prompt = oracle.prompt(40)
    walk, bad = oracle.walk(prompt, 200), oracle.ring.bad
    emitted = 1
    for accepted in oracle.cycles(prompt, 200):
        known_good = [not bad[walk[emitted + i - 1]] for i in range(accepted)]
        assert all(known_good)
        emitted += accepted + 1
        if accepted < 7 and emitted < 200:
            assert bad[walk[emitted - 2]]


def test_a_random_pair_follows_its_whole_context(pair):
    folder = pair("random").target
    model, _ = load(str(folder))
    tokens = mx.array([[7 + i for i in range(24)]])
    other = mx.array([[99] + [8 + i for i in range(23)]])
    gap = mx.abs(model(tokens)[0, -1] - model(other)[0, -1]).max().item()
    assert gap > 1e-3


def test_a_copy_steps_every_token_of_the_last_ones_once(pair):
    oracle = pair(family="dflash", eos="off", lag=2).oracle
    prompt = oracle.prompt(9)
    order, place = oracle.ring.order, oracle.ring.place
    once = [int(order[(place[token] + 1) % len(order)]) for token in prompt[-3:]]
    assert oracle.walk(prompt, 3) == once
    assert oracle.walk(prompt, 6)[3:] == oracle.walk(once * 2, 3)


def test_a_dflash_block_is_right_up_to_the_lag_and_the_anchor(pair):
    oracle = pair(family="dflash", eos="off", lag=2).oracle
    assert oracle.cycles(oracle.prompt(9), 9) == [3, 3]
    bad = pair(family="dflash", eos="off", partial=0.5).oracle
    prompt = bad.prompt(40)
    walk = prompt + bad.walk(prompt, 60)
    at = len(prompt) + 1
    for accepted in bad.cycles(prompt, 60):
        assert not any(
            bad.ring.bad[walk[at + i - 1 - bad.lag]] for i in range(accepted)
        )
        if accepted < 7 and at + accepted + 1 < len(walk):
            assert bad.ring.bad[walk[at + accepted - 1 - bad.lag]]
        at += accepted + 1


def test_a_cut_cycle_drafts_only_what_is_right(pair):
    oracle = pair(family="dspark", eos="off", partial=0.5).oracle
    prompt = oracle.prompt(40)
    cut = oracle.cut_cycles(prompt, 60)
    assert all(drafted == accepted for drafted, accepted in cut)
    assert [accepted for _, accepted in cut] == oracle.cycles(prompt, 60)
    assert (0, 0) in cut[:-1]


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
@pytest.mark.parametrize("kind", ["oracle", "random"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_pair_has_the_published_tensors(pair, kind, shards, family):
    made = pair(kind, draft_shards=shards, layer_types="mixed", family=family)
    config = read_drafter_config(made.drafter, kind=family)
    assert config.num_draft_tokens == made.options.drafted == 7
    stored = stored_tensors(made.drafter)
    names = published_names(stored, where="drafter")
    assert all(stored_name == name for stored_name, name in names.items())
    check_tensors({n: t.shape for n, t in stored.items()}, config, where="drafter")
    assert len({tensor.file for tensor in stored.values()}) == shards


def test_options_reach_the_config(pair):
    made = pair(
        "random",
        vocab=16,
        eos_token_ids=(2,),
        block_size=4,
        block_size_at="both",
        rope="nested",
        target_rope="nested",
        is_causal=True,
        taps=(0, 2),
        layer_types="fs",
        sliding_window=12,
        draft_config={
            "hidden_act": None,
            "dflash_config": {"output_multiplier": 0.3},
        },
    )
    config = read_drafter_config(made.drafter)
    assert config.vocab_size == 16
    assert config.block_size == 4
    assert config.target_layer_ids == (0, 2)
    assert config.layer_types == ("full_attention", "sliding_attention")
    assert config.sliding_window == 12
    assert config.is_causal is True
    assert config.output_multiplier == 0.3
    raw = json.loads((made.drafter / "config.json").read_text())
    assert "rope_theta" not in raw and "hidden_act" not in raw
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 4
    target = json.loads((made.target / "config.json").read_text())
    assert target["eos_token_id"] == [2] and "rope_theta" not in target


def test_equal_options_share_a_folder(pair):
    assert pair("random", seed=8) is pair("random", seed=8)
    assert pair("random", seed=8).target != pair("random", seed=9).target


@pytest.mark.parametrize(
    ("thinking", "ending"),
    [(None, ""), (True, "<think>\n"), (False, "<think>\n\n</think>\n\n")],
)
def test_a_thinking_template_has_three_endings(pair, thinking, ending):
    made = pair("random", thinking=True, template_bos=True)
    tokenizer = AutoTokenizer.from_pretrained(made.target)  # mlx-lm sets a default
    settings = {} if thinking is None else {"enable_thinking": thinking}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        tokenize=False,
        **settings,
    )
    head = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text == head + ending


def test_a_thinking_vocabulary_shows_its_tags(pair):
    _, tokenizer = load(str(pair("random", thinking=True).target))
    ids = tokenizer.encode("<think>a b</think>", add_special_tokens=False)
    assert ids[0] == 6 and ids[-1] == 7
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a b</think>"


def test_plain_encoding_of_a_rendered_prompt_doubles_the_bos(pair):
    _, tokenizer = load(str(pair("random", template_bos=True).target))
    assert tokenizer.encode("<s>a")[:2] == [0, 0]
    assert tokenizer.encode("<s>a", add_special_tokens=False)[0] == 0
    assert tokenizer.encode("<s>a", add_special_tokens=False)[1] != 0


@pytest.mark.parametrize(
    "text", ["a b  c\n\td", "你好🙂👨‍👩‍👧 é", "the <|im_end|> end"]
)
def test_the_byte_level_tokenizer_keeps_any_text(pair, text):
    _, tokenizer = load(str(pair().target))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_special_ids_are_where_the_configs_say(pair):
    _, tokenizer = load(str(pair().target))
    assert set(tokenizer.eos_token_ids) == {1, EOS2}
    assert tokenizer.convert_tokens_to_ids("<|MASK|>") == MASK


@pytest.mark.parametrize(
    "options",
    [
        *({"vocab": 32}, {"top_k": 8}, {"lag": 3}, {"rank": 8}, {"tied": True}),
        {"family": "dspark", "dtype": "bfloat16"},
        {"family": "dspark", "rank": 16},
        {"family": "dspark", "lag": 6},
        {"family": "dflash", "tied": True, "hidden": 160},
        {"family": "dflash", "draft_head_dim": 16},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_sizes_without_room_for_an_oracle_are_refused(tmp_path, options):
    with pytest.raises(ValueError):
        write_pair(tmp_path / "pair", **options)


def test_taps_beyond_the_target_are_refused():
    with pytest.raises(ValueError, match="outside the 4 layers"):
        PairOptions(taps=(1, 4)).resolved()


def test_the_same_seed_writes_the_same_bytes(tmp_path):
    first = write_pair(tmp_path / "a", partial=0.2)
    second = write_pair(tmp_path / "b", partial=0.2)
    for one in sorted((tmp_path / "a").rglob("*.*")):
        two = tmp_path / "b" / one.relative_to(tmp_path / "a")
        assert one.read_bytes() == two.read_bytes()
    assert np.array_equal(first.oracle.ring.order, second.oracle.ring.order)
