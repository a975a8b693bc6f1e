"""Every spelling of one drafter drafts the same, read directly or converted."""

from dataclasses import replace

import mlx.core as mx
import pytest
from dialects import (
    DIALECTS,
    own_tables,
    prefixed,
    serving,
    spoken,
    standalone,
    training,
)
from drafter_files import (
    content,
    read_config,
    read_tensors,
    stored,
    write_drafter,
)
from tiny import (
    KINDS,
    drafter_numbers,
    drafter_raw,
    features_of,
    mlx_target,
    torch_target,
)

from mlx_dflash2.convert import check, to_mlx, to_torch
from mlx_dflash2.families import read_drafter_config
from mlx_dflash2.loading import load_drafter

ANCHORS, STEP = range(20, 26), 9  # a block after every nine more context rows
ROWS = STEP * len(ANCHORS)
EVERY = [(family, dialect) for family in DIALECTS for dialect in DIALECTS[family]]
EACH = pytest.mark.parametrize(
    ("family", "dialect"),
    EVERY,
    ids=[f"{family}-{dialect.__name__}" for family, dialect in EVERY],
)


@pytest.fixture(scope="module")
def target():
    return mlx_target()


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("torch")
    return torch_target()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Each family's drafter in the plain spelling."""
    folder = tmp_path_factory.mktemp("plain")
    return {family: written(folder / family, family) for family in DIALECTS}


def written(folder, family, dialect=lambda raw, numbers: (raw, numbers)):
    raw = drafter_raw(family=family)
    numbers = drafter_numbers(KINDS[family].from_dict(raw), seed=4)
    raw, numbers = spoken(dialect, raw, numbers)
    tensors = {name: stored(array, "float32") for name, array in numbers.items()}
    return write_drafter(folder, tensors, config=raw)


def drafts(folder, target) -> list[list[int]]:
    """Greedy blocks over a growing context; DSpark's also cut where it is unsure."""
    drafter = load_drafter(folder, target)
    context, features = drafter.make_context(), features_of(drafter.config, ROWS)
    thresholds = (0.0, 0.5) if drafter.config.kind == "dspark" else (0.0,)
    found = []
    for anchor in ANCHORS:
        drafter.extend(mx.array(features[:, context[0].end :][:, :STEP]), context)
        for limit in thresholds:
            block = drafter.propose(anchor, target, context, confidence_threshold=limit)
            found.append(block.tokens.tolist())
    return found


def torch_drafts(folder, target) -> list[list[int]]:
    """The blocks that are not cut."""
    import torch

    from mlx_dflash2.torch.loading import load_drafter

    drafter = load_drafter(folder, target)
    context, features = drafter.make_context(), features_of(drafter.config, ROWS)
    found = []
    with torch.no_grad():
        for anchor in ANCHORS:
            rows = torch.from_numpy(features[:, context.length :][:, :STEP])
            drafter.extend(rows, context)
            block = drafter.propose(anchor, target, context)
            found.append(block.tokens.tolist())
    return found


@pytest.mark.parametrize("family", list(DIALECTS))
def test_the_plain_blocks_differ_from_anchor_to_anchor(family, plain, target):
    found = drafts(plain[family], target)
    assert len(set(map(tuple, found))) >= len(ANCHORS) - 1
    assert max(map(len, found)) == 7


@EACH
def test_a_dialect_is_read_as_the_plain_spelling(
    family, dialect, plain, target, tmp_path
):
    folder = written(tmp_path / "spoken", family, dialect)
    assert content(folder) != content(plain[family])
    config, expected = map(read_drafter_config, (folder, plain[family]))
    assert type(config) is KINDS[family]
    assert replace(config, explicit_first_row=False) == expected
    assert drafts(folder, target) == drafts(plain[family], target)


@pytest.mark.parametrize(
    ("family", "dialect"),
    [
        ("dflash2", training),
        ("dflash", serving),
        ("dflash", own_tables),
        ("dspark", prefixed),
        ("dspark", standalone),
    ],
)
def test_torch_reads_it_alike(family, dialect, plain, reference, tmp_path):
    folder = written(tmp_path / "spoken", family, dialect)
    assert torch_drafts(folder, reference) == torch_drafts(plain[family], reference)


@EACH
def test_convert_writes_the_familys_published_spelling(
    family, dialect, plain, target, tmp_path
):
    source = written(tmp_path / "spoken", family, dialect)
    to_torch(source, tmp_path / "torch")
    config, kind = read_config(tmp_path / "torch"), KINDS[family]
    assert config["architectures"] == [kind.architecture]
    assert config["model_type"] == "qwen3" and "auto_map" not in config
    assert config["num_target_layers"] == 4 and config["rope_theta"] == 5e6
    read = read_drafter_config(tmp_path / "torch")
    for field, place in kind.places.items():
        at = config
        for part in place.split("."):
            at = at[part]
        value = getattr(read, field)
        assert at == (list(value) if isinstance(value, tuple) else value), place
    tensors, expected = map(read_tensors, (tmp_path / "torch", plain[family]))
    own = {"embed_tokens.weight", "lm_head.weight"}
    assert {name: tensors[name] for name in tensors if name not in own} == expected
    assert drafts(tmp_path / "torch", target) == drafts(plain[family], target)


@EACH
def test_there_and_back_changes_nothing(family, dialect, tmp_path):
    source = written(tmp_path / "spoken", family, dialect)
    report = to_torch(source, tmp_path / "torch")
    to_mlx(tmp_path / "torch", tmp_path / "mlx")
    to_torch(tmp_path / "mlx", tmp_path / "again")
    assert content(tmp_path / "again") == content(tmp_path / "torch")
    assert read_tensors(tmp_path / "mlx") == read_tensors(tmp_path / "torch")
    assert check(report, tmp_path / "torch").passed
