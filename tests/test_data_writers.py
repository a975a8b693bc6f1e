"""Both writers continue prompts as plain decoding would, whatever the batch."""

import numpy as np
import pytest
from chi_square import chi_square
from pair_files import EOS

from mlx_dflash2.data.mlx_writer import MLXWriter
from mlx_dflash2.data.writer import Sampling, Written, loops
from mlx_dflash2.loading import load_target

GREEDY = Sampling()


@pytest.fixture(scope="module", params=["mlx", "torch"])
def writer(request, pair):
    """`writer(pair, batch)` for each backend."""
    loaded = {}
    if request.param == "torch":
        torch = pytest.importorskip("torch")
        torch.set_num_threads(1)

    def make(made, batch):
        ends = frozenset(made.options.eos_token_ids)
        if made.target not in loaded:
            loaded[made.target] = load(request.param, made.target)
        if request.param == "mlx":
            return MLXWriter(loaded[made.target], ends, batch=batch)
        from mlx_dflash2.data.torch_writer import TorchWriter

        return TorchWriter(loaded[made.target], ends, batch=batch)

    return make


def load(backend, folder):
    if backend == "mlx":
        return load_target(folder)[0]
    from mlx_dflash2.torch.loading import load_target as load_torch_target

    return load_torch_target(folder)


def some_prompts(made, count=9):
    """Prompts of many lengths, the longest first; some are soon at an end."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(8, 500, 40 - 2 * n).tolist() for n in range(count)]
    if made.oracle:
        ring = made.oracle.ring
        for n, prompt in enumerate(prompts):
            prompt[-1] = int(ring.order[ring.place[EOS] - 30 * (n + 1)])
    return prompts


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_greedy_answers_are_those_of_plain_decoding(writer, pair, batch):
    made = pair("oracle")
    prompts = some_prompts(made)
    written = writer(made, batch).write(prompts, max_tokens=60, sampling=GREEDY, seed=0)
    walks = [made.oracle.walk(prompt, 60) for prompt in prompts]
    ended = [walk[-1] in made.options.eos_token_ids for walk in walks]
    assert any(ended) and not all(ended)
    assert written == [
        Written(walk[:-1], "stop") if end else Written(walk, "length")
        for walk, end in zip(walks, ended, strict=True)
    ]


def test_prompts_may_share_their_beginning_or_be_the_same(writer, pair):
    made = pair("oracle")
    first, second, third = some_prompts(made, 3)
    prompts = [first, first + second, first + third[:1], first]
    written = writer(made, 4).write(prompts, max_tokens=9, sampling=GREEDY, seed=0)
    assert [text.tokens for text in written] == [
        made.oracle.walk(prompt, 9) for prompt in prompts
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_an_answer_has_at_most_max_tokens(writer, pair, count):
    made = pair("oracle")
    prompts = some_prompts(made, 3)
    written = writer(made, 2).write(prompts, max_tokens=count, sampling=GREEDY, seed=0)
    assert [text.tokens for text in written] == [
        made.oracle.walk(prompt, count) for prompt in prompts
    ]


def test_no_prompts_give_no_answers(writer, pair):
    assert (
        writer(pair("oracle"), 4).write([], max_tokens=3, sampling=GREEDY, seed=0) == []
    )


def test_a_seed_repeats_what_was_sampled(writer, pair):
    made = pair("random")
    draw = {"max_tokens": 12, "sampling": Sampling(1.0, 0.9)}
    first, again, other = (
        writer(made, 4).write(some_prompts(made), seed=seed, **draw)
        for seed in (5, 5, 6)
    )
    assert first == again != other


def test_samples_follow_the_temperature_inside_the_nucleus(writer, pair):
    made = pair("random", vocab=48, tokenizer="wordlevel")
    prompt, draws = [9, 20, 30, 11], 3000
    sampling = Sampling(1.5, 0.8)
    written = writer(made, 500).write(
        [prompt] * draws, max_tokens=1, sampling=sampling, seed=2
    )
    tokens = [text.tokens[0] for text in written if text.tokens]
    counts = np.bincount(tokens, minlength=48)
    chances = nucleus(made, prompt, sampling)
    for end in made.options.eos_token_ids:  # ends are not handed out
        chances[end] = 0
    assert (chances == 0).sum() > 4
    assert chi_square(counts, chances) > 0.001


def nucleus(made, prompt, sampling):
    """What the next token may be, and how likely. Shape: (V,)."""
    import mlx.core as mx

    target, _ = load_target(made.target)
    hidden, _ = target.forward(mx.array([prompt]), target.make_cache())
    logits = np.array(target.head(hidden)[0, -1], np.float64)
    likely = np.exp(logits - logits.max())
    likely /= likely.sum()
    order = np.argsort(-likely)
    inside = order[np.cumsum(likely[order]) - likely[order] < sampling.top_p]
    chances = np.zeros_like(likely)
    chances[inside] = likely[inside] ** (1 / sampling.temperature)
    return chances / chances.sum()


def test_a_loop_is_a_run_of_twenty_tokens_met_five_times():
    once = list(range(100, 120))
    assert not loops(once * 4)
    assert loops(once * 5)
    assert loops([7] * 24) and not loops([7] * 23)
    apart = [token for n in range(5) for token in [*once, n]]
    assert loops(apart)
    assert not loops(list(range(1000))) and not loops([])


def test_a_cache_with_room_holds_what_the_usual_one_does():
    torch = pytest.importorskip("torch")
    from transformers.cache_utils import DynamicLayer

    from mlx_dflash2.data.torch_cache import ROOM, RoomyLayer

    usual, roomy = DynamicLayer(), RoomyLayer()
    generator = torch.Generator().manual_seed(0)

    def push(rows, count):
        new = torch.randn(2, rows, 3, count, 4, generator=generator)
        for expected, found in zip(usual.update(*new), roomy.update(*new), strict=True):
            assert torch.equal(expected, found)

    push(1, 5)
    for layer in (usual, roomy):
        layer.batch_repeat_interleave(3)
    for count in (4, *[1] * ROOM, 2, ROOM + 1):
        push(3, count)
    for layer in (usual, roomy):
        layer.batch_select_indices(torch.tensor([2, 0]))
    push(2, 1)
    push(2, 1)
    assert roomy.get_seq_length() == usual.get_seq_length()
