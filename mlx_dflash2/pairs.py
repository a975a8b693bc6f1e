"""Published drafters and the target each was trained for."""

import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from .checkpoint import stored_tensors
from .config_reader import read_json
from .demo import DEMO, MODEL, is_demo
from .errors import DFlash2Error

SAMPLE = 4096  # bytes read from the middle of a weight file for a fingerprint


@dataclass(frozen=True)
class PublishedPair:
    """A drafter on the Hub, or the built-in one. What is not known is None.

    Attributes:
        about: What a name that is no repository stands for.
        revisions: Branches worth knowing; the first is the default.
        terms: What to know before use, beyond the licence's name.
        acceptance_length: As its card states it, with the machine in `measured_on`.
        target_fingerprints: Of target folders it was trained for, see `fingerprint`.
    """

    target: str
    drafter: str
    kind: str
    about: str | None = None
    revisions: tuple[str, ...] = ("main",)
    licence: str | None = None
    terms: str | None = None
    acceptance_length: float | None = None
    measured_on: str | None = None
    target_fingerprints: tuple[str, ...] = ()


PAIRS = (  # of one target the strongest first
    PublishedPair(
        target="openbmb/MiniCPM5-2B",
        drafter="openbmb/MiniCPM5-2B-DSpark",
        kind="dspark",
    ),
    PublishedPair(
        target="openbmb/MiniCPM5-2B",
        drafter="applepie69/MiniCPM5-2B-DFlash2",
        kind="dflash2",
        licence="Apache-2.0",
        acceptance_length=1.248,
        measured_on="Tesla T4",
    ),
    PublishedPair(
        target="openbmb/MiniCPM5-2B-SFT",
        drafter="jayyun98/MiniCPM5-2B-SFT-Draftfit-DFlash2",
        kind="dflash2",
        revisions=("main", "v5"),
        terms="research and non-commercial use: its training data has terms of its own",
    ),
    PublishedPair(
        target=DEMO,
        drafter=DEMO,
        kind="dflash2",
        about=f"{MODEL} in float32; its drafter is not shipped yet",
        revisions=(),
        licence="Apache-2.0",
        target_fingerprints=("307c17a58e97930e",),
    ),
)


def published_drafter(name: str) -> PublishedPair | None:
    """The table's entry for a drafter's repository."""
    return next((pair for pair in PAIRS if pair.drafter == name), None)


def drafter_for(target: str, kind: str | None = None) -> PublishedPair:
    """The strongest published drafter of a target, by its name or its folder.

    A repository and `demo` are matched by name, a local folder by where the Hub's cache
    put it or by its fingerprint: the RL, SFT and base variants of a model have the same
    shape, and a folder's name proves nothing.

    Args:
        kind: Of this family only, such as "dspark".

    Raises:
        DFlash2Error: None is known for this target.
    """
    folder, repository = Path(target).expanduser(), target
    if not is_demo(target) and folder.is_dir():
        repository = cached_repository(folder)
    wanted = [pair for pair in PAIRS if kind in (None, pair.kind)]
    for pair in wanted:
        if pair.target == repository:
            return pair
    if repository is None and any(pair.target_fingerprints for pair in wanted):
        found = fingerprint(folder)
        for pair in wanted:
            if found in pair.target_fingerprints:
                return pair
    family = f" of family {kind}" if kind else ""
    raise DFlash2Error(
        f"{target}: no published drafter{family} is known for it; name one with "
        "--draft-model, or decode with --plain (`mlx-dflash2 models` lists the known)"
    )


def cached_repository(folder: Path) -> str | None:
    """The repository whose snapshot a folder of the Hub's cache is."""
    from huggingface_hub import constants

    cache, folder = Path(constants.HF_HUB_CACHE).resolve(), folder.resolve()
    if not folder.is_relative_to(cache):
        return None
    inside = folder.relative_to(cache).as_posix()
    found = re.fullmatch(r"models--([^/]+)/snapshots/[0-9a-f]{40}", inside)
    return found[1].replace("--", "/") if found else None


def fingerprint(folder: Path) -> str:
    """A short hash of a model's settings and of samples of its weights.

    Reads config.json's architecture fields and a few kilobytes from the middle of each
    weight file, so it is the same for the same weights wherever they lie.
    """
    config = read_json(folder / "config.json")
    fields = ("hidden_size", "num_hidden_layers", "vocab_size", "rope_theta")
    digest = hashlib.sha256(repr([config.get(name) for name in fields]).encode())
    files = {tensor.file for tensor in stored_tensors(folder).values()}
    for file in sorted(files, key=lambda file: file.name):
        size = file.stat().st_size
        with file.open("rb") as opened:
            opened.seek(size // 2)
            digest.update(size.to_bytes(8, "little") + opened.read(SAMPLE))
    return digest.hexdigest()[:16]


def as_dict(pair: PublishedPair) -> dict:
    """The entry as `models --json` prints it."""
    return {
        name: value
        for name, value in asdict(pair).items()
        if name != "target_fingerprints"
    }
