"""What a run works with: target, rows, the drafter's shape, and the contract."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mlx_dflash2 import __version__
from mlx_dflash2.checkpoint import Source
from mlx_dflash2.config import DrafterConfig, check_fit
from mlx_dflash2.config_reader import read_json
from mlx_dflash2.data.rows import Row, RowSet
from mlx_dflash2.data.target_text import load_target_text
from mlx_dflash2.data.units import HELD_OUT, TRAIN
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.pairs import fingerprint
from mlx_dflash2.sources import find_target

from ..loading import load_target
from ..target import Target
from .config import Shape, TrainConfig
from .contract import Contract
from .feature_cache import FeatureCache, bytes_a_token
from .features import Features, Online
from .geometry import new_drafter, read_geometry
from .precision import Precision
from .warm_start import Parent
from .world import World

FEATURES = "features"
TEXT = ("tokenizer_sha256", "template_sha256")  # what rows and target must share


@dataclass(frozen=True)
class Setup:
    """Everything but the weights that are trained.

    Attributes:
        drafter: The config.json of the drafter.
        held_out: Rows to evaluate on.
        features: Of the rows trained on; evaluation has its own.
        contract: Without what a warm start took.
    """

    config: TrainConfig
    world: World
    precision: Precision
    target: Target
    rows: RowSet
    anneal: RowSet | None
    held_out: list[Row]
    features: Features
    drafter: dict[str, Any]
    contract: Contract

    @property
    def geometry(self) -> DrafterConfig:
        return read_geometry(self.drafter)


def make_setup(
    config: TrainConfig,
    world: World,
    *,
    drafter: dict[str, Any] | None = None,
    parent: Parent | None = None,
) -> Setup:
    """Load and check what a run needs.

    Args:
        config: Of the run.
        world: This process and its peers.
        drafter: The config.json of a run that goes on; None makes a new one.
        parent: The drafter a new run starts from.

    Raises:
        DFlash2Error: Something is missing, or does not fit the rest.
    """
    config.need("target", "data", "out")
    source = target_source(config)
    raw = read_json(source.folder / "config.json")
    drafter = drafter or new_drafter(inherited(config.drafter, parent), raw)
    config.objective.check(read_geometry(drafter))
    rows = read_rows(Path(config.data) / TRAIN, source)
    anneal = None
    if config.anneal_data:
        anneal = read_rows(Path(config.anneal_data) / TRAIN, source)
    sets = {"rows": rows} if anneal is None else {"rows": rows, "anneal": anneal}
    precision = Precision.choose(config.precision, world.device)
    target = open_target(config, source, precision)
    check_fit(read_geometry(drafter), target, where="drafter", name=source.name)
    contract = Contract(
        settings=config.settled() | {"precision": precision.name},
        target=_target_facts(source, rows),
        data={side: _data_facts(found) for side, found in sets.items()},
        drafter=drafter,
        parent=None,
        code=__version__,
    )
    return Setup(
        config=config,
        world=world,
        precision=precision,
        target=target,
        rows=rows,
        anneal=anneal,
        held_out=_held_out(config, source, world),
        features=_features(config, contract, target, [*sets.values()]),
        drafter=drafter,
        contract=contract,
    )


def _held_out(config: TrainConfig, source: Source, world: World) -> list[Row]:
    rows = choose_held_out(config, source)
    if len(rows) < world.size:
        raise DFlash2Error(
            f"{config.data}: {len(rows)} held-out rows are too few for "
            f"{world.size} processes; prepare the data with a larger --held-out"
        )
    return rows


def _features(
    config: TrainConfig, contract: Contract, target: Target, sets: list[RowSet]
) -> Features:
    """Captured at every visit, or once and for all."""
    geometry = read_geometry(contract.drafter)
    taps = geometry.target_layer_ids
    if not config.cache_features:
        return Online(target, taps)
    cache = FeatureCache(
        target,
        taps,
        teaches=config.objective.needs_teacher,
        fingerprint=contract.target["fingerprint"],
        folder=Path(config.features or Path(config.out) / FEATURES),
    )
    cache.demand_room(sets, bytes_a_token(geometry, config.objective))
    return cache


def target_source(config: TrainConfig) -> Source:
    """The target's files."""
    return find_target(config.target, revision=config.revision, offline=config.offline)


def inherited(shape: Shape, parent: Parent | None) -> Shape:
    """The shape with what it leaves open as a warm start has it: mask token, taps."""
    if parent is None:
        return shape
    mask, taps = shape.mask_token_id, parent.config.target_layer_ids
    if mask is None:
        shape = replace(shape, mask_token_id=parent.config.mask_token_id)
    if not shape.taps and len(taps) == shape.num_taps:
        shape = replace(shape, taps=taps)
    return shape


def open_target(config: TrainConfig, source: Source, precision: Precision) -> Target:
    """The frozen target on its device."""
    if config.threads:
        torch.set_num_threads(config.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return load_target(
        source.folder, dtype=precision.target_dtype, device=precision.device
    )


def read_rows(folder: Path, source: Source) -> RowSet:
    """Rows that were prepared for this target.

    Raises:
        DFlash2Error: They were prepared for another one.
    """
    found, facts = RowSet(folder), load_target_text(str(source.folder)).facts
    known = found.manifest.get("target") or {}
    for name in TEXT:
        if known.get(name) != facts[name]:
            raise DFlash2Error(
                f"{folder}: was prepared for {known.get('name')}, whose {name} is "
                f"{known.get(name)}, but that of {source.name} is {facts[name]}; "
                "prepare the data with this target"
            )
    return found


def choose_held_out(config: TrainConfig, source: Source) -> list[Row]:
    """The held-out rows to evaluate on: always the same, from everywhere."""
    rows = read_rows(Path(config.data) / HELD_OUT, source)
    count = config.evaluation.rows or len(rows)
    chosen = sorted(rows.order(seed=0, epoch=0)[:count].tolist())
    return [rows[index] for index in chosen]


def _target_facts(source: Source, rows: RowSet) -> dict[str, Any]:
    text = rows.manifest["target"]
    return {
        "name": source.name,
        "revision": source.revision,
        "fingerprint": fingerprint(source.folder),
        "enable_thinking": rows.manifest.get("enable_thinking"),
        **{name: text[name] for name in TEXT},
    }


def _data_facts(rows: RowSet) -> dict[str, Any]:
    counts = ("rows", "documents", "tokens", "supervised", "sources")
    return {"sha256": rows.sha256} | {name: rows.manifest.get(name) for name in counts}
