"""The table of published pairs, and how a drafter is found for a target."""

import contextlib
import json
import shutil
from dataclasses import replace

import pytest
from command_line import assert_refused, run
from fake_hub import FakeHub
from huggingface_hub import constants

from mlx_dflash2 import pairs
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import FAMILIES
from mlx_dflash2.pairs import PAIRS, cached_repository, drafter_for, fingerprint

MODEL, SFT = "openbmb/MiniCPM5-2B", "openbmb/MiniCPM5-2B-SFT"
DSPARK, DFLASH2 = "openbmb/MiniCPM5-2B-DSpark", "applepie69/MiniCPM5-2B-DFlash2"
DRAFTFIT = "jayyun98/MiniCPM5-2B-SFT-Draftfit-DFlash2"


def test_the_table_holds_what_is_published():
    assert [(pair.target, pair.drafter, pair.kind) for pair in PAIRS] == [
        (MODEL, DSPARK, "dspark"),
        (MODEL, DFLASH2, "dflash2"),
        (SFT, DRAFTFIT, "dflash2"),
        ("demo", "demo", "dflash2"),
    ]
    official, community, draftfit, _ = PAIRS
    assert (community.licence, community.acceptance_length) == ("Apache-2.0", 1.248)
    assert "T4" in community.measured_on
    assert draftfit.revisions == ("main", "v5")
    assert "research" in draftfit.terms and "non-commercial" in draftfit.terms
    assert official.revisions == community.revisions == ("main",)


def test_what_is_not_known_is_empty():
    official, community, draftfit, _ = PAIRS
    for pair in (official, draftfit):
        assert pair.acceptance_length is pair.measured_on is pair.licence is None
    assert official.terms is community.terms is None


def test_every_kind_is_a_family():
    assert {pair.kind for pair in PAIRS} <= {family.kind for family in FAMILIES}


def test_a_repository_gets_its_strongest_drafter():
    assert drafter_for(MODEL).drafter == DSPARK
    assert drafter_for(SFT).drafter == DRAFTFIT


@pytest.mark.parametrize(
    "name",
    [
        *("openbmb/MiniCPM5-2B-Base", "openbmb/MiniCPM5-2B-RL", "MiniCPM5-2B"),
        *("someone/MiniCPM5-2B", "openbmb/minicpm5-2b", "openbmb/MiniCPM5-1B"),
    ],
)
def test_another_name_is_another_target(name):
    with pytest.raises(DFlash2Error, match="no published drafter.*--draft-model"):
        drafter_for(name)


@pytest.mark.parametrize("name", [MODEL, SFT])
def test_a_folder_named_like_a_repository_proves_nothing(
    pair, monkeypatch, tmp_path, name
):
    shutil.copytree(pair("random").target, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for spelled in (name, tmp_path / name, f"./{name}/"):
        with pytest.raises(DFlash2Error, match="no published drafter"):
            drafter_for(str(spelled))


def test_a_snapshot_of_the_hub_cache_is_its_repository(tmp_path, monkeypatch):
    name = "models--openbmb--MiniCPM5-2B-SFT/snapshots/" + "0a" * 20
    snapshot, elsewhere = tmp_path / "hub" / name, tmp_path / "elsewhere" / name
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot.mkdir(parents=True)
    elsewhere.mkdir(parents=True)
    assert cached_repository(elsewhere) is None
    assert cached_repository(snapshot) == SFT
    assert drafter_for(str(snapshot)).drafter == DRAFTFIT
    monkeypatch.chdir(snapshot)
    assert drafter_for(".").drafter == DRAFTFIT
    link = tmp_path / "MiniCPM5-2B"
    link.symlink_to(snapshot)
    assert drafter_for(str(link)).drafter == DRAFTFIT
    assert cached_repository(snapshot.parent) is None
    assert cached_repository(tmp_path) is None


def test_a_local_folder_is_known_by_its_fingerprint(pair, monkeypatch, tmp_path):
    one, other = pair("random").target, pair("random", seed=1).target
    entry = replace(PAIRS[2], target_fingerprints=(fingerprint(one),))
    monkeypatch.setattr(pairs, "PAIRS", (PAIRS[0], entry))
    assert drafter_for(str(one)) is entry
    moved = tmp_path / "MiniCPM5-2B"
    shutil.copytree(one, moved)
    assert drafter_for(str(moved)) is entry
    with pytest.raises(DFlash2Error, match="no published drafter"):
        drafter_for(str(other))


def test_a_fingerprint_sees_weights_and_shape(pair, tmp_path):
    one, other = pair("random").target, pair("random", seed=1).target
    assert fingerprint(one) != fingerprint(other)
    changed = tmp_path / "changed"
    shutil.copytree(one, changed)
    assert fingerprint(changed) == fingerprint(one)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    assert fingerprint(changed) != fingerprint(one)


# The commands.


def test_models_lists_what_is_known():
    result = run("models")
    assert result.exit_code == 0 and result.stderr == ""
    for pair in PAIRS:
        assert f"{pair.target}\n  {pair.drafter}  ({pair.kind})\n" in result.stdout
    assert "licence: Apache-2.0" in result.stdout
    assert "acceptance length: 1.248 (Tesla T4, its card)" in result.stdout
    assert "revisions: main, v5" in result.stdout
    assert "non-commercial" in result.stdout
    assert "None" not in result.stdout


def test_models_as_json_says_null_where_nothing_is_known():
    listed = json.loads(run("models", "--json").stdout)
    assert [entry["drafter"] for entry in listed] == [pair.drafter for pair in PAIRS]
    assert listed[0] == {
        "target": MODEL,
        "drafter": DSPARK,
        "kind": "dspark",
        "about": None,
        "revisions": ["main"],
        "licence": None,
        "terms": None,
        "acceptance_length": None,
        "measured_on": None,
    }


@pytest.fixture
def hub(pair, monkeypatch, tmp_path):
    """A Hub that serves small pairs under the published names."""
    dspark = pair(family="dspark", eos="off")
    dflash2 = pair(eos="off")
    with contextlib.closing(FakeHub()) as hub:
        hub.add(MODEL, dspark.target)
        hub.add(SFT, dflash2.target)
        hub.commits = {
            DSPARK: hub.add(DSPARK, dspark.drafter),
            DFLASH2: hub.add(DFLASH2, dflash2.drafter),
            "v5": hub.add(DRAFTFIT, dflash2.drafter, refs=("v5",)),
            DRAFTFIT: hub.add(DRAFTFIT, dflash2.drafter),
        }
        hub.used_by(monkeypatch, tmp_path / "cache")
        yield hub


@pytest.mark.parametrize("flags", [[], ["--draft-model", "auto"]], ids=str)
def test_generate_takes_the_official_drafter_by_itself(hub, flags):
    result = run("generate", "a", "-m", 9, "--json", *flags)
    assert result.exit_code == 0, result.stderr
    assert f"Drafter: {DSPARK} (dspark) for {MODEL}\n" in result.stderr
    found = json.loads(result.stdout)
    assert (found["draft_model"], found["draft_kind"]) == (DSPARK, "dspark")
    assert found["draft_revision"] == hub.commits[DSPARK]
    assert found["stats"]["accepted_per_cycle"] == [7]


def test_auto_takes_the_drafter_of_the_kind_that_is_asked_for(hub):
    result = run("generate", "a", "-m", 3, "--json", "--draft-kind", "dflash2")
    assert json.loads(result.stdout)["draft_model"] == DFLASH2
    result = run("generate", "a", "-m", 3, "--draft-kind", "dflash")
    assert_refused(result, "no published drafter of family dflash")


def test_auto_is_never_a_folder_that_hides_the_published_drafter(
    hub, pair, monkeypatch, tmp_path
):
    shutil.copytree(pair("random").drafter, tmp_path / DSPARK)
    monkeypatch.chdir(tmp_path)
    result = run("generate", "a", "-m", 3)
    assert_refused(result, DSPARK, "hides the published drafter")


def test_terms_come_before_a_conversion(hub, tmp_path):
    result = run("convert", DRAFTFIT, tmp_path / "out", "--to-mlx")
    assert result.exit_code == 0, result.stderr
    assert "non-commercial" in result.stderr


def test_a_named_drafter_is_taken_without_a_word(hub):
    result = run("generate", "a", "-m", 9, "--json", "--draft-model", DFLASH2)
    assert "Drafter: " not in result.stderr
    assert json.loads(result.stdout)["draft_model"] == DFLASH2


@pytest.mark.parametrize("flags", [[], ["--draft-model", DRAFTFIT]], ids=str)
def test_terms_come_before_anything_is_fetched(hub, monkeypatch, flags):
    import click

    seen, echo = [], click.echo

    def note(message="", **options):
        seen.append((message, len(hub.requests)))
        return echo(message, **options)

    monkeypatch.setattr(click, "echo", note)
    result = run("generate", "a", "-m", 9, "--model", SFT, "--json", *flags)
    assert result.exit_code == 0, result.stderr
    terms = [asked for message, asked in seen if "non-commercial" in str(message)]
    assert terms == [0]
    assert hub.requests
    assert json.loads(result.stdout)["draft_revision"] == hub.commits[DRAFTFIT]


def test_a_revision_of_the_automatic_drafter_is_recorded(hub):
    flags = "--model", SFT, "--draft-revision", "v5", "--json"
    found = json.loads(run("generate", "a", "-m", 3, *flags).stdout)
    assert found["draft_revision"] == hub.commits["v5"]


def test_plain_decoding_chooses_no_drafter(hub):
    result = run("generate", "a", "-m", 3, "--plain", "--model", SFT)
    assert result.exit_code == 0
    assert "Drafter" not in result.stderr and "commercial" not in result.stderr


@pytest.mark.parametrize("command", [["generate", "a"], ["doctor"]], ids=" ".join)
def test_an_unknown_target_is_refused_before_anything_is_fetched(hub, command):
    asked = len(hub.requests)
    result = run(*command, "--model", "someone/else")
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: someone/else: no published drafter")
    assert "--draft-model" in last and "Traceback" not in result.stderr
    assert len(hub.requests) == asked


def test_a_pair_that_does_not_fit_is_refused(hub, pair):
    small = pair("random", hidden=128).target
    result = run("generate", "a", "--model", small, "--draft-model", DSPARK)
    assert result.exit_code == 2
    assert "hidden_size is 96, but the target's is 128" in result.stderr


def test_a_folder_without_a_known_drafter_is_refused(pair):
    result = run("generate", "a", "--model", pair("random").target)
    assert_refused(result, "no published drafter is known", "mlx-dflash2 models")
