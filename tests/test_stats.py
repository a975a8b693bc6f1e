"""What a generation counts adds up."""

import pytest

from mlx_dflash2.stats import AcceptanceStats


def test_cycles_add_up():
    stats = AcceptanceStats(plain_steps=3)
    stats.record_cycle(drafted=7, accepted=7, emitted=8)
    stats.record_cycle(drafted=7, accepted=0, emitted=1)
    stats.record_cycle(drafted=2, accepted=1, emitted=2)
    assert (stats.cycles, stats.drafted, stats.accepted) == (3, 16, 8)
    assert stats.acceptance_length == 11 / 3
    assert stats.acceptance_rate == 0.5
    tokens = 1 + sum(stats.emitted_per_cycle) + stats.plain_steps
    assert tokens == 15


def test_accepted_never_exceeds_what_was_handed_out():
    stats = AcceptanceStats()
    stats.record_cycle(drafted=7, accepted=5, emitted=3)  # an end cut the cycle short
    assert stats.accepted_per_cycle == [3] and stats.emitted_per_cycle == [3]


def test_a_last_plain_step_is_a_cycle_of_nothing():
    stats = AcceptanceStats()
    stats.record_cycle(drafted=0, accepted=0, emitted=1)
    assert stats.cycles == 1 and stats.acceptance_length == 1.0
    assert stats.acceptance_rate is None


def test_nothing_counted_gives_no_rates():
    assert AcceptanceStats().acceptance_length is None
    assert AcceptanceStats().acceptance_rate is None


def test_two_counts_share_nothing():
    one, two = AcceptanceStats(), AcceptanceStats()
    one.record_cycle(drafted=1, accepted=1, emitted=2)
    assert two.cycles == 0


@pytest.mark.parametrize("counted", [False, True])
def test_the_json_form_has_every_count(counted):
    stats = AcceptanceStats()
    if counted:
        stats.record_cycle(drafted=3, accepted=1, emitted=2)
    assert stats.as_dict() == {
        "cycles": int(counted),
        "drafted": 3 if counted else 0,
        "accepted": int(counted),
        "plain_steps": 0,
        "acceptance_length": 2.0 if counted else None,
        "acceptance_rate": 1 / 3 if counted else None,
        "accepted_per_cycle": [1] if counted else [],
        "emitted_per_cycle": [2] if counted else [],
    }
