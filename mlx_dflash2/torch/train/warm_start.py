"""Starting from the weights of another drafter, of the same family or another."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from mlx_dflash2.checkpoint import EVERY_FILE, Source
from mlx_dflash2.config import DrafterConfig
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import read_drafter_config
from mlx_dflash2.names import BORROWED
from mlx_dflash2.pairs import published_drafter
from mlx_dflash2.sources import find_drafter

from ..drafter import Drafter
from ..loading import read_weights

SELECTOR = "candidate_selector."
PROJECTION = f"{SELECTOR}hidden_projection.weight"
RENAMED = {  # DSpark's tables score a pair of tokens as the selector's codebooks do
    "markov_head.markov_w1.weight": f"{SELECTOR}predecessor_codebook",
    "markov_head.markov_w2.weight": f"{SELECTOR}successor_codebook",
}
COMPARED = ("target_layer_ids", "mask_token_id", "rope_theta", "first_row")


@dataclass(frozen=True)
class Parent:
    """The drafter a run starts from.

    Attributes:
        licence: As its model card says; None where it does not.
    """

    source: Source
    config: DrafterConfig
    licence: str | None

    @classmethod
    def find(cls, name: str, *, revision: str | None, offline: bool) -> "Parent":
        """Read a folder's or Hub repository's config.

        Raises:
            DFlash2Error: It holds no drafter, or a quantized one.
        """
        source = find_drafter(
            name, revision=revision, offline=offline, files=EVERY_FILE
        )
        config = read_drafter_config(source.folder)
        if config.quantization is not None:
            raise DFlash2Error(
                f"{name}: is quantized; start from the unquantized drafter, or first "
                "run `mlx-dflash2 convert --to-torch -d` on it"
            )
        return cls(source, config, _licence(source))


@dataclass(frozen=True)
class Taken:
    """What a warm start did with each tensor.

    Attributes:
        parent: Name of the drafter started from.
        revision: Its commit; None for a local folder.
        licence: It binds the new drafter as well.
        taken: Names copied, in the new drafter's spelling.
        other_shape: Names both have, of different shapes.
        fresh: Names the new drafter starts anew, those of other shape included.
        unused: Names of the parent that found no place.
        differences: Settings that differ, which the weights must learn anew.
    """

    parent: str
    revision: str | None
    licence: str | None
    taken: tuple[str, ...]
    other_shape: tuple[str, ...]
    fresh: tuple[str, ...]
    unused: tuple[str, ...]
    differences: tuple[str, ...]

    def as_dict(self) -> dict:
        return asdict(self)

    def lines(self) -> list[str]:
        """The report, as it is printed."""
        listed = {
            "other shape": self.other_shape,
            "new": self.fresh,
            "unused": self.unused,
            "differs": self.differences,
        }
        origin = f"{self.parent}@{self.revision}" if self.revision else self.parent
        return [
            f"warm start from {origin} (licence: {self.licence or 'not stated'}): "
            f"{len(self.taken)} tensors taken",
            *(
                f"  {title}: {', '.join(names)}"
                for title, names in listed.items()
                if names
            ),
        ]


def warm_start(drafter: Drafter, parent: Parent) -> Taken:
    """Copy what fits by name and shape into a new drafter.

    What is missing keeps its first values. Convolutions that come on top pass
    everything through; layers that do, add nothing; and the selector that takes
    DSpark's tables adds nothing until it has learned to. `fc` is not taken over where
    it would read other taps.

    Raises:
        DFlash2Error: Nothing fits, or only a part of the selector.
    """
    weights = read_weights(parent.source, parent.config)
    named = _renamed(drafter, weights)
    if parent.config.target_layer_ids != drafter.config.target_layer_ids:
        named.pop("fc.weight")
    own = drafter.state_dict()
    taken = [n for n in own if n in named and named[n].shape == own[n].shape]
    _check(drafter, taken, parent.source.name)
    with torch.no_grad():
        for name in taken:
            own[name].copy_(named[name])
        _quiet_what_is_new(drafter, taken)
    return Taken(
        parent=parent.source.name,
        revision=parent.source.revision,
        licence=parent.licence,
        taken=tuple(taken),
        other_shape=tuple(n for n in own if n in named and n not in taken),
        fresh=tuple(name for name in own if name not in taken),
        unused=tuple(sorted(_origins(weights, named) - set(taken) - set(BORROWED))),
        differences=_differences(parent.config, drafter.config),
    )


def _renamed(drafter: Drafter, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parent's tensors, Markov tables as codebooks where they have their shape."""
    own, named = drafter.state_dict(), dict(weights)
    tables = {new: weights[old] for old, new in RENAMED.items() if old in weights}
    if tables and all(
        new in own and own[new].shape == table.shape for new, table in tables.items()
    ):
        named = {n: w for n, w in named.items() if n not in RENAMED} | tables
    return named


def _origins(weights: dict[str, Tensor], named: dict[str, Tensor]) -> set[str]:
    """The parent's names, those that were renamed by their new one."""
    return set(named) | {n for n in weights if n not in named and n not in RENAMED}


def _check(drafter: Drafter, taken: list[str], parent: str) -> None:
    if not taken:
        raise DFlash2Error(
            f"{parent}: no tensor has the name and shape of one of the new drafter's; "
            "is it for another target?"
        )
    selector = {n for n in drafter.state_dict() if n.startswith(SELECTOR)}
    found = selector & set(taken)
    if found and selector - found - {PROJECTION}:
        raise DFlash2Error(
            f"{parent}: of the selector only {', '.join(sorted(found))} would fit; "
            "give drafter.selector_rank as it is there, or another one to start the "
            "selector anew"
        )


def _quiet_what_is_new(drafter: Drafter, taken: list[str]) -> None:
    """Let new parts add nothing at first, so that the parent's function is kept."""
    for name, parameter in drafter.named_parameters():
        layer = re.match(r"layers\.(\d+)\.", name)
        stands_alone = layer and not any(n.startswith(layer[0]) for n in taken)
        if stands_alone and name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.zero_()
        if (
            name == PROJECTION
            and name not in taken
            and set(RENAMED.values()) <= {*taken}
        ):
            parameter.zero_()


def _differences(parent: DrafterConfig, config: DrafterConfig) -> tuple[str, ...]:
    return tuple(
        f"{name} {getattr(parent, name)} there, {getattr(config, name)} here"
        for name in COMPARED
        if getattr(parent, name) != getattr(config, name)
    )


def _licence(source: Source) -> str | None:
    """The licence in the front matter of the model card, or in our own list."""
    card = Path(source.folder) / "README.md"
    if card.is_file():
        text = card.read_text(encoding="utf-8", errors="replace")
        head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        found = head and re.search(r"^license:\s*(\S+)", head[1], re.MULTILINE)
        if found:
            return found[1].strip("'\"")
    pair = published_drafter(source.name)
    return pair.licence if pair else None
