"""The torch loop: lossless, exact budget, exact ends, exact counts."""

from types import SimpleNamespace

import pytest
from tiny import TARGET, drafter_config, drafter_numbers, torch_drafter, torch_target

from mlx_dflash2.errors import DFlash2Error

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from mlx_dflash2.torch.decode import decode  # noqa: E402
from mlx_dflash2.torch.loading import load_drafter, load_target  # noqa: E402
from mlx_dflash2.torch.proposal import Proposal  # noqa: E402
from mlx_dflash2.torch.sampling import SamplingConfig, probabilities  # noqa: E402

PROMPT = [5, 6, 7, 200, 31, 8, 90]


class Scripted:
    """Drafts the given continuation, right for `right` tokens of each block.

    Attributes:
        calls: How often it drafted.
    """

    def __init__(self, prompt_length: int, tokens: list[int], right: int, block=8):
        self.config = drafter_config(block_size=block)
        self.start, self.tokens, self.right = prompt_length, tokens, right
        self.calls = 0

    def make_context(self):
        return SimpleNamespace(length=0)

    def extend(self, features, context):
        assert features.shape[-1] == 128
        context.length += features.shape[1]

    def propose(self, anchor, target, context, **_):
        self.calls += 1
        index = context.length - self.start  # of the anchor among the emitted tokens
        assert self.tokens[index] == anchor
        size = self.config.num_draft_tokens
        drafted = (self.tokens[index + 1 :] + [0] * size)[:size]
        if self.right < size:
            drafted[self.right] = (drafted[self.right] + 1) % 256
        tokens = torch.tensor(drafted)
        return Proposal(tokens, tokens[:, None], torch.ones(size, 1))


@pytest.fixture(scope="module")
def target():
    return torch_target()


@pytest.fixture(scope="module")
def plain(target):
    """Sixty greedy tokens, decoded one by one."""
    return decode(target, None, PROMPT, max_tokens=60, eos=()).tokens


def real_drafter(kind="mixed", **changes):
    config = drafter_config(kind, **changes)
    return torch_drafter(config, drafter_numbers(config))


def test_plain_decoding_takes_the_best_token_every_time(target, plain):
    tokens = list(PROMPT)
    for _ in range(12):
        logits = target.model(torch.tensor([tokens])).logits
        tokens.append(int(logits[0, -1].argmax()))
    assert plain[:12] == tuple(tokens[len(PROMPT) :])


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("causal", [None, False, True])
def test_greedy_equals_plain_decoding(target, plain, kind, causal):
    drafter = real_drafter(kind, is_causal=causal)
    assert decode(target, drafter, PROMPT, max_tokens=40, eos=()).tokens == plain[:40]


@pytest.mark.parametrize("right", range(8))
def test_scripted_drafts_are_kept_as_far_as_they_are_right(target, plain, right):
    drafter = Scripted(len(PROMPT), list(plain), right)
    result = decode(target, drafter, PROMPT, max_tokens=41, eos=())
    assert result.tokens == plain[:41]
    assert all(a == right for a in result.stats.accepted_per_cycle[:-1])
    emitted = result.stats.emitted_per_cycle
    assert emitted[:-1] == [right + 1] * (len(emitted) - 1)
    assert 1 + sum(emitted) == 41


@pytest.mark.parametrize("right", [0, 3, 7])
@pytest.mark.parametrize("block", [2, 5, 8])
def test_the_budget_is_met_exactly(target, plain, right, block):
    for budget in range(1, 21):
        drafter = Scripted(len(PROMPT), list(plain), right, block)
        result = decode(target, drafter, PROMPT, max_tokens=budget, eos=())
        assert result.tokens == plain[:budget]
        assert result.finish_reason == "length"
        left = budget - 1
        for drafted, emitted in zip(
            result.stats.drafted_per_cycle, result.stats.emitted_per_cycle, strict=True
        ):
            assert drafted == min(block - 1, left - 1)
            left -= emitted
        assert left == 0
        assert drafter.calls == sum(d > 0 for d in result.stats.drafted_per_cycle)


@pytest.mark.parametrize("right", [0, 3, 7])
def test_it_stops_at_an_end_at_every_position(target, plain, right):
    seen = set()
    for position, end in enumerate(plain[:24]):
        if end in seen:
            continue
        seen.add(end)
        drafter = Scripted(len(PROMPT), list(plain), right)
        result = decode(target, drafter, PROMPT, max_tokens=60, eos=(end, 999))
        assert result.tokens == plain[: position + 1]
        assert result.finish_reason == "stop"
        stats = result.stats
        assert 1 + sum(stats.emitted_per_cycle) == position + 1
        assert all(
            a <= e
            for a, e in zip(
                stats.accepted_per_cycle, stats.emitted_per_cycle, strict=True
            )
        )
    assert len(seen) > 8


def test_an_end_on_the_last_token_of_the_budget_is_a_stop(target, plain):
    drafter = Scripted(len(PROMPT), list(plain), 7)
    result = decode(target, drafter, PROMPT, max_tokens=4, eos=(plain[3],))
    assert (result.tokens, result.finish_reason) == (plain[:4], "stop")


def test_the_targets_own_ends_hold_unless_others_are_given(target, plain):
    first = plain.index(plain[20])
    ending = torch_target(TARGET | {"eos_token_id": [1, plain[20]]})
    assert decode(ending, None, PROMPT, max_tokens=60).tokens == plain[: first + 1]
    assert decode(ending, None, PROMPT, max_tokens=30, eos=()).tokens == plain[:30]


@pytest.mark.parametrize("step", [1, 3, 2048])
def test_the_prefill_step_changes_nothing(target, plain, step):
    drafter = real_drafter()
    result = decode(target, drafter, PROMPT, max_tokens=20, eos=(), prefill_step=step)
    assert result.tokens == plain[:20]


def test_only_asked_for_drafts_are_verified(target, plain):
    drafter = Scripted(len(PROMPT), list(plain), 7)
    result = decode(target, drafter, PROMPT, max_tokens=13, eos=(), num_draft_tokens=3)
    assert result.tokens == plain[:13]
    assert result.stats.accepted_per_cycle == [3, 3, 3]


def test_no_drafts_is_plain_decoding(target, plain):
    drafter = Scripted(len(PROMPT), list(plain), 7)
    result = decode(target, drafter, PROMPT, max_tokens=9, eos=(), num_draft_tokens=0)
    assert result.tokens == plain[:9]
    assert (result.stats.cycles, result.stats.plain_steps, drafter.calls) == (0, 8, 0)


def test_after_a_cycle_the_context_equals_a_fresh_prefill(target, plain):
    """Rejected rows must leave nothing behind in cache or context."""
    from mlx_dflash2.torch.decode import Decoding, Drafting

    drafter = real_drafter("sliding")
    wrong = Scripted(len(PROMPT), list(plain), 2)
    greedy = SamplingConfig(), Drafting(limit=7)
    run, fresh = (Decoding(target, drafter, *greedy) for _ in range(2))
    tokens = [run.prefill(PROMPT, 2048)]
    run._propose = lambda anchor: wrong.propose(
        anchor, target, run.context, temperature=0, generator=None
    )
    for _ in range(3):
        drafted, verdict = run.cycle(tokens[-1], 7)
        assert verdict.accepted == 2
        tokens += [*drafted[:2], verdict.bonus]
    fresh.prefill([*PROMPT, *tokens[:-1]], 2048)
    assert run.length == fresh.length
    for layer in range(2):
        for ours, theirs in zip(run.context[layer], fresh.context[layer], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partial": 0.3, "rope_theta": 5e6, "rope": "nested", "target_rope": "nested"},
        {"layer_types": "sliding", "is_causal": False},
        {"layer_types": "mixed", "block_size": 4, "seed": 2},
        {"dtype": "bfloat16", "partial": 0.2},
    ],
    ids=["plain", "partial", "sliding", "mixed", "bfloat16"],
)
def test_oracle_pairs_give_the_known_text_and_counts(pair, options):
    made = pair(**options)
    target = load_target(made.target)
    drafter = load_drafter(made.drafter, target)
    prompt = made.oracle.prompt(40)
    result = decode(target, drafter, prompt, max_tokens=48)
    assert list(result.tokens) == made.oracle.walk(prompt, 48)
    assert result.stats.accepted_per_cycle == made.oracle.cycles(prompt, 48)


def test_a_seed_repeats_a_sampled_run(target):
    drafter = real_drafter()

    def run(seed):
        sampling = SamplingConfig(temperature=1.0, top_p=0.95, seed=seed)
        return decode(
            target, drafter, PROMPT, max_tokens=24, eos=(), sampling=sampling
        ).tokens

    assert run(0) == run(0)
    assert run(0) != run(1)


def test_sampling_never_leaves_the_plain_support(target):
    """With two tokens left by top-k every emitted one is among the best two."""
    drafter = real_drafter()
    sampling = SamplingConfig(temperature=1.5, top_k=2, seed=3)
    result = decode(target, drafter, PROMPT, max_tokens=40, eos=(), sampling=sampling)
    logits, _ = target.forward(torch.tensor([[*PROMPT, *result.tokens]]))
    best = logits[0].topk(3).indices  # one spare for nearly equal logits
    for index, token in enumerate(result.tokens):
        assert token in best[len(PROMPT) + index - 1]
    greedy = decode(target, None, PROMPT, max_tokens=40, eos=()).tokens
    assert result.tokens != greedy


def test_the_second_token_follows_the_target_through_the_whole_loop():
    """400 runs over sixteen tokens, three of which top-k leaves at each place."""
    small = {"vocab_size": 16, "mask_token_id": 15, "block_size": 2}
    shallow = {"num_hidden_layers": 1, "layer_types": None, "num_target_layers": 2}
    config = drafter_config(**small, **shallow, target_layer_ids=[0])
    drafter = torch_drafter(config, drafter_numbers(config))
    target = torch_target(TARGET | {"vocab_size": 16, "num_hidden_layers": 2})
    prompt, options = [5, 6, 7], {"temperature": 1.5, "top_k": 3}

    def next_chances(tokens):
        logits, _ = target.forward(torch.tensor([tokens]), logits_to_keep=1)
        return probabilities(logits[0], SamplingConfig(**options))[0].tolist()

    expected = {
        (first, second): p * q
        for first, p in enumerate(next_chances(prompt))
        for second, q in enumerate(next_chances([*prompt, first]))
        if p * q
    }
    counts, accepted = dict.fromkeys(expected, 0), 0
    for seed in range(400):
        sampling = SamplingConfig(**options, seed=seed)
        result = decode(
            target, drafter, prompt, max_tokens=3, eos=(), sampling=sampling
        )
        counts[result.tokens[:2]] += 1
        accepted += result.stats.accepted
    assert 20 < accepted < 380  # both branches of the rule are at work
    squares = sum(
        (counts[pair] - 400 * chance) ** 2 / (400 * chance)
        for pair, chance in expected.items()
    )
    assert squares < 31.9  # chi-square of at most 8 degrees at 0.0001


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [3, 256]}, "token 256, outside the target's vocabulary of 256"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"prefill_step": 0}, "prefill_step is 0"),
        ({"num_draft_tokens": 8}, "num_draft_tokens is 8.*drafts 7"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
    ],
)
def test_requests_it_cannot_meet_are_refused(target, changes, message):
    request = {"prompt": PROMPT, "max_tokens": 4} | changes
    with pytest.raises(DFlash2Error, match=message):
        decode(target, real_drafter(), **request)
