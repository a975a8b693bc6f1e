"""The name `demo`: what it means, where it is understood, what hides it."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import assert_refused, run

from mlx_dflash2 import demo, load_drafter, load_target, pairs, sources
from mlx_dflash2.convert import to_mlx
from mlx_dflash2.data.target_text import load_target_text
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.pairs import drafter_for, fingerprint
from mlx_dflash2.sources import find_drafter, find_target


@pytest.fixture
def asked():
    """Of every call for the demo target, whether it had to be offline."""
    return []


@pytest.fixture
def built_in(asked, pair, monkeypatch, tmp_path):
    """A tiny pair in place of the demo pair, and an empty folder to work in."""
    made = pair(eos="off")

    def demo_target(*, offline):
        asked.append(offline)
        return made.target

    monkeypatch.setattr(sources, "demo_target", demo_target)
    monkeypatch.setattr(demo, "DRAFTER", made.drafter)
    monkeypatch.chdir(tmp_path)
    return made


def generated(*flags):
    result = run("generate", "a", "-m", 9, "--json", *flags)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), result.stderr


def test_the_name_is_the_target_and_its_drafter(built_in):
    target, _ = load_target("demo")
    drafter = load_drafter("demo", target)
    assert (target.source.folder, target.source.name) == (built_in.target, "demo")
    assert (drafter.source.folder, drafter.source.name) == (built_in.drafter, "demo")
    assert target.source.revision is drafter.source.revision is None


def test_offline_reaches_the_demo_target(built_in, asked):
    for offline in (False, True):
        find_target("demo", offline=offline)
    assert asked == [False, True]


@pytest.mark.parametrize("flags", [[], ["--draft-model", "demo"]], ids=str)
def test_generate_takes_the_demo_pair_offline(built_in, asked, flags):
    found, said = generated("--model", "demo", "--offline", *flags)
    assert (found["model"], found["draft_model"]) == ("demo", "demo")
    assert found["stats"]["accepted_per_cycle"] == [7]
    assert ("Drafter: demo (dflash2) for demo\n" in said) == (not flags)
    assert set(asked) == {True}


def test_the_demo_drafter_serves_a_folder_of_its_target(built_in, monkeypatch):
    known = fingerprint(built_in.target)
    entry = pairs.PublishedPair("demo", "demo", "dflash2", target_fingerprints=(known,))
    monkeypatch.setattr(pairs, "PAIRS", (entry,))
    found, _ = generated("--model", built_in.target)
    assert found["draft_model"] == "demo"


def test_another_drafter_may_be_named(built_in, pair):
    other = pair("random").drafter
    found, _ = generated("--model", "demo", "--draft-model", other)
    assert found["draft_model"] == str(other)


def test_another_family_is_refused(built_in):
    result = run("generate", "a", "--model", "demo", "--draft-kind", "dspark")
    assert_refused(result, "demo: no published drafter of family dspark")


def test_doctor_examines_the_demo_pair(built_in):
    result = run("doctor", "--model", "demo", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["pair"]
    assert (found["model"], found["draft_model"]) == ("demo", "demo")
    assert found["draft_folder"] == str(built_in.drafter)


def test_the_demo_pair_is_benched(built_in):
    one = "--domain", "math", "--prompts-per-domain", 1
    result = run("bench", "--model", "demo", "--offline", "-m", 4, *one)
    assert result.exit_code == 0, result.output
    assert "Drafter: demo (dflash2) for demo\n" in result.stderr


def test_the_cycle_of_the_demo_pair_is_benched_with_random_weights(built_in):
    flags = "--random-weights", "-p", 8, "-g", 9, "-n", 1, "--draft-model", "auto"
    result = run("bench", "cycle", "--model", "demo", *flags)
    assert result.exit_code == 0, result.output


def test_the_demo_drafter_is_converted(built_in, tmp_path):
    report = to_mlx("demo", tmp_path / "out")
    assert (report.source.name, report.source.folder) == ("demo", built_in.drafter)


def test_rows_are_prepared_for_the_demo_target(built_in):
    assert load_target_text("demo").facts["name"] == "demo"


def test_torch_loads_the_demo_pair(built_in):
    pytest.importorskip("torch")
    from mlx_dflash2.torch.loading import load_drafter, load_target

    target = load_target("demo")
    assert load_drafter("demo", target).config.kind == "dflash2"


def test_training_starts_from_the_demo_pair(built_in):
    pytest.importorskip("torch")
    from mlx_dflash2.torch.train.warm_start import Parent

    parent = Parent.find("demo", revision=None, offline=True)
    assert (parent.source.name, parent.licence) == ("demo", "Apache-2.0")
    taps = json.dumps(built_in.options.taps)
    flags = "--model", "demo", "--warm-start", "demo", f"--set=drafter.taps={taps}"
    result = run("train", "run", "--plan", *flags)
    assert result.exit_code == 0, result.stderr
    assert "target: demo, 4 layers" in result.stdout


def test_models_lists_the_demo_pair_and_what_it_is():
    assert "demo\n  demo  (dflash2)\n    about: SmolLM2-135M" in run("models").stdout
    entry = json.loads(run("models", "--json").stdout)[-1]
    assert (entry["target"], entry["drafter"]) == ("demo", "demo")
    assert entry["licence"] == "Apache-2.0" and entry["revisions"] == []


# What is refused.


def make_folder(pair):
    shutil.copytree(pair.target, "demo")


def make_file(pair):
    Path("demo").write_text("")


def make_broken_link(pair):
    Path("demo").symlink_to("nowhere")


@pytest.mark.parametrize("make", [make_folder, make_file, make_broken_link])
def test_what_hides_the_demo_pair_is_never_chosen_between(built_in, asked, make):
    make(built_in)
    for flags in (
        ["--model", "demo"],
        ["--model", "demo", "--draft-model", built_in.drafter],
        ["--model", built_in.target, "--draft-model", "demo"],
    ):
        result = run("generate", "a", "-m", 3, *flags)
        assert_refused(result, "hides the demo pair", "./demo", "elsewhere")
    for find in (find_target, find_drafter, drafter_for):
        with pytest.raises(DFlash2Error, match="hides the demo pair"):
            find("demo")
    assert asked == []


def test_a_path_is_always_the_folder(built_in, asked):
    make_folder(built_in)
    for spelled in ("./demo", "demo/", Path("demo"), Path("demo").resolve()):
        assert find_target(spelled).folder.resolve() == Path("demo").resolve()
    assert asked == []


@pytest.mark.parametrize("flag", ["--revision", "--draft-revision"])
def test_a_revision_of_the_demo_pair_is_refused(built_in, asked, flag):
    result = run("generate", "a", "--model", "demo", flag, "v1")
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert "demo: the demo pair has no revisions; leave out revision 'v1'" in last
    assert asked == []


def test_a_package_without_the_drafter_says_so(built_in, asked, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "DRAFTER", tmp_path / "not_there")
    result = run("generate", "a", "--model", "demo")
    last = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and last.startswith(f"Error: {tmp_path}/not_there: ")
    assert "--plain" in last
    assert asked == []


def test_no_other_spelling_means_the_demo_pair(built_in, asked):
    for name in ("Demo", "demo ", "demo/x/y"):
        with pytest.raises(DFlash2Error):
            find_target(name, offline=True)
    assert asked == []
