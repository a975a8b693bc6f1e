"""From conversations to rows to train on: one folder, resumable, the same each time.

    OUT/prepare.json       the settings; a folder is continued with these only
    OUT/sources/           what was streamed from the Hub
    OUT/written/           what the target wrote, if it was asked to
    OUT/units/             what each finished unit gave
    OUT/train/, held_out/  rows, as `rows.RowSet` reads them once all is done
    OUT/recipe.toml        the recipe with every revision fixed
    OUT/SOURCE_TERMS.md    where the text comes from, and what its licences ask

A unit is a run of texts, packed by itself. Finished units are kept.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mlx_dflash2 import __version__
from mlx_dflash2.config_reader import read_json
from mlx_dflash2.conversations import Conversation
from mlx_dflash2.errors import DFlash2Error

from .chat import Chat
from .formatting import ChatFormat
from .recipes import Recipe, Take, read_recipe, write_recipe
from .rewriting import Rewriting, rewritten
from .rows import COUNTS, chunks, write_json, write_manifest
from .sources import Source, file_sha256, hub_sources, local_source
from .split import held_out_below
from .target_text import load_target_text
from .terms import SourceTerms, terms_text
from .units import SIDES, TRAIN, RowFormat, Unit, write_unit
from .writing import WritingOptions

UNIT = 2000  # texts
Item = Conversation | str
Say = Callable[[str], None]


@dataclass(frozen=True)
class PrepareOptions:
    """What `train prepare` is asked for.

    Attributes:
        model: Folder or Hub id of the target.
        out: The folder to write, or to continue.
        data: Files of conversations, one a line.
        recipe: "published" or a TOML file; None for local data only.
        phase: Of the recipe, from 1.
        row_length: Tokens a row may have; longer texts lose their end.
        pack: Put several documents into a row.
        held_out: Below 1 the share of prompts, from 1 on how many.
        enable_thinking: The chat template's variable; None leaves it undefined.
        last_turn_only: Learn the last answer of each conversation only.
        min_supervised: Documents with fewer tokens to learn are left out.
        limit: Read so many rows of each source at most.
        rewriting: What the target shall write first.
    """

    model: str
    out: Path
    data: tuple[Path, ...] = ()
    recipe: str | None = None
    phase: int = 1
    revision: str | None = None
    row_length: int = 1536
    pack: bool = True
    held_out: float = 0.02
    enable_thinking: bool | None = None
    last_turn_only: bool = False
    min_supervised: int = 8
    limit: int | None = None
    offline: bool = False
    rewriting: Rewriting = Rewriting()


@dataclass(frozen=True)
class PrepareReport:
    """What a finished folder holds.

    Attributes:
        read: Conversations and texts.
        dropped: Answers and documents left out, by reason.
        rows: By side; `documents`, `tokens` and `supervised` likewise.
        warnings: What the sources' terms ask to be said.
    """

    folder: Path
    read: int
    dropped: dict[str, int]
    rows: dict[str, int]
    documents: dict[str, int]
    tokens: dict[str, int]
    supervised: dict[str, int]
    warnings: list[str]

    def lines(self) -> list[str]:
        """The report as `train prepare` prints it."""
        lines = [f"{self.folder}: {self.read} texts read"]
        lines += [
            f"  {side}: {self.rows[side]} rows, {self.documents[side]} documents, "
            f"{self.tokens[side]} tokens, {self.supervised[side]} to learn"
            for side in SIDES
        ]
        lines += [f"  left out: {n} ({why})" for why, n in self.dropped.items()]
        return lines + [f"  note: {warning}" for warning in self.warnings]


def prepare(options: PrepareOptions, say: Say) -> PrepareReport:
    """Write the rows, or go on where an earlier call of the same settings stopped.

    Args:
        say: Told of progress.

    Raises:
        DFlash2Error: Something cannot be had or read, the folder is of other settings,
            or nothing is left to learn.
    """
    recipe, takes = _recipe(options)
    target = load_target_text(
        options.model, revision=options.revision, offline=options.offline
    )
    settings = _settings(options, takes, target.facts)
    _claim(options.out, settings)
    for name in (*SIDES, "units"):
        (options.out / name).mkdir(exist_ok=True)
    sources = [local_source(path, options.limit) for path in options.data]
    if recipe is not None:
        fetched, revisions = hub_sources(
            takes, options.out / "sources", offline=options.offline, say=say
        )
        sources += fetched
        write_recipe(recipe.pinned(revisions), options.out / "recipe.toml")
    if options.rewriting.asked:
        sources = rewritten(sources, options.rewriting, target, _base(options), say)
    below = held_out_below(options.held_out, _items(sources))
    form = RowFormat(
        ChatFormat(Chat(target, options.enable_thinking), options.last_turn_only),
        options.row_length,
        options.pack,
        options.min_supervised,
        below,
    )
    units = []
    for number, items in enumerate(chunks(_items(sources), UNIT)):
        units.append(write_unit(options.out, number, items, form))
        say(f"{sum(unit.read for unit in units)} texts")
    facts = {**settings, "target": target.facts, "held_out_below": below}
    return _finish(options.out, facts, [s.terms for s in sources], units)


def plan(options: PrepareOptions) -> list[str]:
    """What `prepare` would do; nothing is opened or written.

    Raises:
        DFlash2Error: The options contradict each other.
    """
    _, takes = _recipe(options)
    most = f", at most {options.limit} of each source" if options.limit else ""
    thinking = {None: "the template decides", True: "on", False: "off"}
    filling = "packed" if options.pack else "one document each"
    done = len(list((options.out / "units").glob("*.json")))
    return [
        f"target: {options.model}, thinking: {thinking[options.enable_thinking]}",
        *(f"data: {path}" for path in options.data),
        *(
            f"data: {take.dataset.repo}@{take.dataset.revision or 'default branch'}, "
            f"{take.count} rows after {take.first} ({take.dataset.licence})"
            for take in takes
        ),
        *options.rewriting.lines(),
        f"rows: up to {options.row_length} tokens, {filling}{most}",
        f"held out: {options.held_out:g} of the prompts"
        if options.held_out < 1
        else f"held out: {options.held_out:g} prompts",
        f"out: {options.out}" + (f", {done} units are done" if done else ""),
    ]


def _recipe(options: PrepareOptions) -> tuple[Recipe | None, list[Take]]:
    if options.recipe is None:
        if not options.data and not options.rewriting.self_prompt:
            raise DFlash2Error(
                "there is nothing to prepare; name conversations with --data, a "
                "mixture of data sets with --recipe, or let the target write all of "
                "it with --self-prompt"
            )
        return None, []
    recipe = read_recipe(options.recipe)
    takes = recipe.takes(options.phase)
    if options.limit is not None:
        takes = [
            Take(take.dataset, take.first, min(take.count, options.limit))
            for take in takes
        ]
    return recipe, takes


def _settings(
    options: PrepareOptions, takes: Sequence[Take], target: dict[str, str | None]
) -> dict[str, Any]:
    """All that decides what is written."""
    same = ("row_length", "pack", "enable_thinking", "last_turn_only")
    return {
        "version": __version__,
        "target": {name: target[name] for name in target if name != "name"},
        "data": [[path.name, file_sha256(path)] for path in options.data],
        "takes": [asdict(take) for take in takes],
        **{name: getattr(options, name) for name in same},
        "held_out": float(options.held_out),
        "min_supervised": options.min_supervised,
        "limit": options.limit,
        "rewriting": asdict(options.rewriting),
    }


def _base(options: PrepareOptions) -> WritingOptions:
    """Who writes where; the rest is up to `rewritten`."""
    return WritingOptions(
        options.model,
        options.out / "written",
        conversations=0,
        enable_thinking=options.enable_thinking,
        revision=options.revision,
        offline=options.offline,
    )


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Take a new folder, or one that was begun with the same settings."""
    path = folder / "prepare.json"
    if path.is_file():
        known = read_json(path)
        for name in settings.keys() | known.keys():
            if settings.get(name) != known.get(name):
                raise DFlash2Error(
                    f"{path}: {name} is {known.get(name)!r}, but this run asks for "
                    f"{settings.get(name)!r}; repeat the settings or choose another "
                    "--out"
                )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.glob("[!.]*"))):
        raise DFlash2Error(
            f"{folder}: is there and was not written by `train prepare`; choose "
            "another --out"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)
    except OSError as error:
        raise DFlash2Error(f"{folder}: cannot be written ({error.strerror})") from None


def _items(sources: Sequence[Source]) -> Iterator[Item]:
    files = (file for source in sources for file in source.files)
    return chain.from_iterable(file.items() for file in files)


def _finish(
    folder: Path,
    facts: dict[str, Any],
    terms: Sequence[SourceTerms],
    units: Sequence[Unit],
) -> PrepareReport:
    """Complete the folder; the report."""
    dropped: Counter[str] = Counter()
    for unit in units:
        dropped.update(unit.dropped)
    shards = {
        side: [found for unit in units if (found := unit.shards[side])]
        for side in SIDES
    }
    if not shards[TRAIN]:
        reasons = ", ".join(f"{why}: {n}" for why, n in dropped.items())
        raise DFlash2Error(
            f"{folder}: nothing is left to learn ({reasons or 'all is held out'}); "
            "see the thinking mode, --held-out and the data"
        )
    (folder / "SOURCE_TERMS.md").write_text(terms_text(terms), encoding="utf-8")
    facts |= {"sources": [asdict(source) for source in terms], "dropped": dropped}
    for side in SIDES:
        write_manifest(folder / side, shards[side], {"split": side, **facts})
    counts = {
        name: {side: sum(getattr(s, name) for s in shards[side]) for side in SIDES}
        for name in COUNTS
    }
    return PrepareReport(
        folder,
        sum(unit.read for unit in units),
        dict(dropped),
        **counts,
        warnings=[warning for source in terms for warning in source.warnings()],
    )
