"""How a run begins: anew, from another drafter, or from a checkpoint."""

import shutil
from dataclasses import replace
from pathlib import Path

import click

from mlx_dflash2.errors import DFlash2Error

from ..drafter import Drafter
from .checkpoints import Saved, Store
from .config import TrainConfig
from .contract import Contract, Progress
from .features import largest_tap
from .geometry import read_geometry
from .head_tokens import HeadTokens
from .init import make_drafter
from .interruption import Interruption
from .learner import BatchLoss, Learner
from .loop import Run
from .metrics import Evaluator
from .optim import make_optimizer
from .setup import Setup, make_setup
from .warm_start import Parent, warm_start
from .world import World

CHECKPOINTS, TERMS = "checkpoints", "SOURCE_TERMS.md"


def train(config: TrainConfig, *, resume: bool = False) -> int:
    """Train; the exit code: 0 at the end or when the time is over, 128 + a signal.

    Args:
        config: Of the run.
        resume: Go on from the newest checkpoint.

    Raises:
        DFlash2Error: Something is missing or does not fit.
    """
    world = World.join(config.device)
    try:
        run = _resumed(config, world) if resume else _new(config, world)
        with Interruption() as interruption:
            run.go(interruption)
        if world.leads:
            click.echo(run.summary(), err=True)
        return 128 + interruption.number if interruption.number else 0
    finally:
        world.leave()


def _new(config: TrainConfig, world: World) -> Run:
    parent = None
    if config.warm_start:
        parent = Parent.find(
            config.warm_start,
            revision=config.warm_start_revision,
            offline=config.offline,
        )
    setup = make_setup(config, world, parent=parent)
    out = Path(config.out)
    if out.exists() and any(out.iterdir()):
        raise DFlash2Error(
            f"{out}: is not empty; go on with --resume, or choose another --out"
        )
    drafter = make_drafter(
        setup.geometry,
        setup.target,
        seed=config.seed,
        final_norm=config.drafter.final_norm,
    )
    fresh, contract = (), setup.contract
    if parent is not None:
        taken = warm_start(drafter, parent)
        fresh, contract = taken.fresh, replace(contract, parent=taken.as_dict())
        if world.leads:
            click.echo("\n".join(taken.lines()), err=True)
    world.wait()  # until all have seen that the folder was empty
    if world.leads:
        for warning in config.warnings():
            click.echo(warning, err=True)
        out.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(config.data) / TERMS, out / TERMS)
    return _assembled(setup, contract, drafter, fresh, Progress())


def _resumed(config: TrainConfig, world: World) -> Run:
    if config.warm_start:
        raise DFlash2Error(
            "warm_start and --resume exclude each other: a run that goes on takes "
            "everything from its checkpoint; leave out one of them"
        )
    saved = find_saved(Path(config.out))
    setup = make_setup(config, world, drafter=saved.contract["drafter"])
    parent = saved.contract["parent"]
    contract = replace(setup.contract, parent=parent)
    contract.demand(saved.contract, saved.folder)
    fresh = tuple(parent["fresh"]) if parent else ()
    run = _assembled(setup, contract, load_saved(saved), fresh, saved.progress)
    saved.restore(run.learner.optimizer)
    run.learner.scaler.load_state_dict(saved.scaler)
    return run


def _assembled(
    setup: Setup,
    contract: Contract,
    drafter: Drafter,
    fresh: tuple[str, ...],
    progress: Progress,
) -> Run:
    config, world = setup.config, setup.world
    drafter = drafter.to(world.device).train()
    scale = setup.precision.tap_scale(
        largest_tap(setup.target, setup.geometry.target_layer_ids, setup.rows)
    )
    loss = BatchLoss(
        drafter,
        setup.target,
        config,
        features=setup.features,
        precision=setup.precision,
        tap_scale=scale,
    )
    optimizer = make_optimizer(drafter, config.optimizer, fresh)
    evaluator = Evaluator(
        drafter,
        setup.target,
        config.objective,
        setup.precision,
        world,
        config.evaluation.blocks_at_once,
        scale,
    )
    store = Store(Path(config.out) / CHECKPOINTS, config.checkpoints.keep)
    learner = Learner(loss, optimizer, config, world, _head_tokens(setup))
    return Run(setup, contract, learner, evaluator, store, progress)


def _head_tokens(setup: Setup) -> HeadTokens | None:
    count = setup.config.batch.head_tokens
    if not count:
        return None
    return HeadTokens.of(
        setup.rows,
        count,
        vocab=setup.target.vocab_size,
        device=setup.world.device,
    )


def find_saved(run: Path, which: str = "latest") -> Saved:
    """A checkpoint of a run's folder.

    Raises:
        DFlash2Error: There is none.
    """
    folder = Store(run / CHECKPOINTS).find(which)
    if folder is None:
        raise DFlash2Error(
            f"{run}: holds no checkpoint {which!r}; is it the folder of a run?"
        )
    return Saved.read(folder)


def load_saved(saved: Saved) -> Drafter:
    """A checkpoint's drafter, in float32 on the CPU."""
    config = read_geometry(saved.contract["drafter"])
    drafter = config.network("mlx_dflash2.torch")(config)
    drafter.load_state_dict(saved.weights())
    return drafter
