"""Recipes and the terms of what they take."""

import pytest

from mlx_dflash2.data.recipes import (
    PUBLISHED,
    is_non_commercial,
    read_recipe,
    write_recipe,
)
from mlx_dflash2.data.terms import SourceTerms, terms_text
from mlx_dflash2.errors import DFlash2Error

RECIPE = """\
[datasets.chats]
repo = "maker/chats@v1"
files = "data/*.parquet"
messages = "turns"
licence = "MIT"
obligations = 'Keep the "notice".'
effect = "none known"

[datasets.pages]
repo = "maker/pages"
files = "*.jsonl"
text = "body"
licence = "CC BY-NC 4.0"
obligations = "Attribute."
effect = "non-commercial"

[[phases]]
name = "one"
take = { chats = 10, pages = 5 }

[[phases]]
name = "two"
take = { chats = 7 }
"""


@pytest.fixture
def written(tmp_path):
    """A function that writes a recipe with some of its text replaced."""

    def write(*replacements):
        text = RECIPE
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return str(path)

    return write


def test_the_published_mixture_has_its_two_phases():
    recipe = read_recipe(PUBLISHED)
    repos = [{take.dataset.repo for take in recipe.takes(number)} for number in (1, 2)]
    assert repos[0] == {
        "HuggingFaceH4/ultrachat_200k",
        "open-r1/OpenR1-Math-220k",
        "ise-uiuc/Magicoder-Evol-Instruct-110K",
        "HuggingFaceTB/smoltalk",
        "HuggingFaceFW/fineweb-edu",
    }
    assert repos[1] == {
        "ise-uiuc/Magicoder-Evol-Instruct-110K",
        "HuggingFaceTB/smoltalk",
        "bigcode/self-oss-instruct-sc2-exec-filter-50k",
        "HuggingFaceH4/ultrachat_200k",
        "open-r1/OpenR1-Math-220k",
    }
    assert len(recipe.phases) == 2


def test_the_published_mixture_bars_no_commercial_use():
    for dataset in read_recipe(PUBLISHED).datasets.values():
        assert dataset.licence and dataset.obligations and dataset.effect
        assert not is_non_commercial(dataset.licence)


def test_plain_text_is_a_small_part_of_the_published_mixture():
    takes = read_recipe(PUBLISHED).takes(1)
    plain = sum(take.count for take in takes if take.dataset.is_text)
    assert plain / sum(take.count for take in takes) <= 0.05


def test_a_phase_reads_on_where_the_ones_before_it_ended(written):
    recipe = read_recipe(written())
    assert [(t.first, t.count) for t in recipe.takes(1)] == [(0, 10), (0, 5)]
    assert [(t.dataset.name, t.first, t.count) for t in recipe.takes(2)] == [
        ("chats", 10, 7)
    ]


def test_a_revision_can_stand_in_the_repository_or_by_itself(written):
    inside = read_recipe(written()).datasets["chats"]
    apart = read_recipe(written(('chats@v1"', 'chats"\nrevision = "v1"')))
    assert (inside.repo, inside.revision) == ("maker/chats", "v1")
    assert apart.datasets["chats"] == inside


def test_a_pinned_recipe_reads_back_as_it_was_written(written, tmp_path):
    recipe = read_recipe(written()).pinned({"pages": "c" * 40})
    write_recipe(recipe, tmp_path / "pinned.toml")
    assert read_recipe(str(tmp_path / "pinned.toml")) == recipe
    assert recipe.datasets["pages"].revision == "c" * 40
    assert recipe.datasets["chats"].revision == "v1"


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("[datasets.chats]", "[datasets.chats", "not valid TOML"),
        ("files = ", "file = ", "file is not known"),
        ('licence = "MIT"\n', "", "datasets.chats: licence is missing"),
        ("messages = ", "rows = ", "expected the columns messages"),
        ('messages = "turns"', 'messages = "a"\ntext = "b"', "expected the columns"),
        ('"turns"', "3", "messages is 3, expected a str"),
        ("chats = 10", "chat = 10", r"phases\[0\]: chat is none of the datasets"),
        ("chats = 10", "chats = 0", "take.chats is 0, expected a whole number above"),
        ("chats = 10", "chats = true", "take.chats is True, expected a whole number"),
        ('name = "two"\n', "", r"phases\[1\]: name is missing"),
        ("[datasets.chats]", '[datasets."a b"]', "expected a name of letters"),
        ('chats@v1"', 'chats@v1"\nrevision = "v2"', "both name one; keep one"),
    ],
)
def test_what_is_no_recipe_is_refused(written, old, new, said):
    with pytest.raises(DFlash2Error, match=said):
        read_recipe(written((old, new)))


def test_a_recipe_that_is_not_there_and_a_phase_it_lacks_are_refused(written):
    with pytest.raises(DFlash2Error, match="absent.toml: no recipe can be read there"):
        read_recipe("absent.toml")
    with pytest.raises(DFlash2Error, match="--phase is 3, but the recipe has 2"):
        read_recipe(written()).takes(3)


@pytest.mark.parametrize("licence", ["CC BY-NC 4.0", "cc-by-nc-sa-4.0", "cc_by_nc"])
def test_non_commercial_licences_are_known(licence):
    assert is_non_commercial(licence)


@pytest.mark.parametrize("licence", ["MIT", "CC BY 4.0", "NCSA", "ODC-By", None])
def test_other_licences_are_not_taken_for_non_commercial(licence):
    assert not is_non_commercial(licence)


def terms(licence, card):
    return SourceTerms(
        "maker/chats",
        "c" * 40,
        obligations="Keep the notice.",
        effect="none known",
        licence=licence,
        card_licence=card,
        card_sha256="d" * 64,
    )


@pytest.mark.parametrize("card", ["mit", None])
def test_terms_without_a_catch_warn_of_nothing(card):
    assert terms("MIT", card).warnings() == []
    assert terms("ODC-By 1.0", "odc-by").warnings() == []


def test_terms_that_bar_commercial_use_warn_wherever_they_stand():
    (known,) = terms("CC BY-NC 4.0", "cc-by-nc-4.0").warnings()[:1]
    assert "bars commercial use" in known
    stated = terms("MIT", "cc-by-nc-4.0").warnings()
    assert any("bars commercial use" in warning for warning in stated)


def test_a_card_that_says_otherwise_is_told():
    (warning,) = terms("MIT", "apache-2.0").warnings()
    assert "its card says the licence is apache-2.0" in warning


def test_the_written_terms_name_everything():
    text = terms_text([terms("MIT", "mit"), terms("CC BY-NC 4.0", None)])
    assert f"| maker/chats | {'c' * 40} | MIT | mit (card sha256 dddddddd" in text
    assert "| Keep the notice. | none known |" in text
    assert "check each card" in text
    assert "\n- maker/chats: licence CC BY-NC 4.0 bars commercial use" in text
