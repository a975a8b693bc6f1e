"""Recipes: which data sets of the Hub, how much of each, in which phase."""

import json
import re
import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from mlx_dflash2.errors import DFlash2Error

PUBLISHED = "published"
FORMS = (("messages",), ("prompt", "answer"), ("text",))  # columns a data set may have
FACTS = ("licence", "obligations", "effect")
NON_COMMERCIAL = re.compile(r"\bnc\b|non-?commercial", re.IGNORECASE)


@dataclass(frozen=True)
class Dataset:
    """A data set of the Hub.

    Attributes:
        name: What recipes call it.
        repo: Its repository.
        revision: Branch, tag or commit; None for the default branch.
        files: A pattern for the Parquet or JSONL files to read.
        columns: The columns that hold what is read: `messages`; `prompt` and `answer`;
            or `text`, which is no conversation.
        licence: As its card states it.
        obligations: What the licence asks for.
        effect: On the licence of weights trained on it.
    """

    name: str
    repo: str
    revision: str | None
    files: str
    columns: dict[str, str]
    licence: str
    obligations: str
    effect: str

    @property
    def is_text(self) -> bool:
        return "text" in self.columns


@dataclass(frozen=True)
class Take:
    """What one phase takes of a data set: `count` rows after the `first` ones."""

    dataset: Dataset
    first: int
    count: int


@dataclass(frozen=True)
class Phase:
    """A part of training with a mixture of its own; `take` counts rows by data set."""

    name: str
    take: dict[str, int]


@dataclass(frozen=True)
class Recipe:
    """Data sets by name, and the phases in order."""

    datasets: dict[str, Dataset]
    phases: tuple[Phase, ...]

    def takes(self, number: int) -> list[Take]:
        """What a phase takes; it reads on where the phases before it ended.

        Args:
            number: Counted from 1.

        Raises:
            DFlash2Error: There is no such phase.
        """
        if not 1 <= number <= len(self.phases):
            raise DFlash2Error(
                f"--phase is {number}, but the recipe has {len(self.phases)} phases"
            )
        *earlier, phase = self.phases[:number]
        return [
            Take(
                self.datasets[name],
                first=sum(before.take.get(name, 0) for before in earlier),
                count=count,
            )
            for name, count in phase.take.items()
        ]

    def pinned(self, revisions: dict[str, str]) -> "Recipe":
        """The recipe with the revisions of data sets fixed, by name."""
        pins = {
            name: replace(self.datasets[name], revision=revision)
            for name, revision in revisions.items()
        }
        return replace(self, datasets=self.datasets | pins)


def read_recipe(name: str) -> Recipe:
    """The published recipe, or one of a TOML file of the same form.

    Raises:
        DFlash2Error: It cannot be read, or is no recipe.
    """
    if name == PUBLISHED:
        text = resources.files(__package__).joinpath("recipes.toml").read_text("utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise DFlash2Error(
                f"{name}: no recipe can be read there ({reason}); name a TOML file, "
                f"or {PUBLISHED}"
            ) from None
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DFlash2Error(f"{name}: not valid TOML ({error})") from None
    return _recipe(content, name)


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write a recipe as a TOML file that `read_recipe` reads."""
    lines = []
    for dataset in recipe.datasets.values():
        pin = {"revision": dataset.revision} if dataset.revision else {}
        facts = {fact: getattr(dataset, fact) for fact in FACTS}
        head = {"repo": dataset.repo, **pin, "files": dataset.files}
        lines.append(f"[datasets.{dataset.name}]")
        lines += [
            f"{key} = {_quoted(value)}"
            for key, value in {**head, **dataset.columns, **facts}.items()
        ]
        lines.append("")
    for phase in recipe.phases:
        take = ", ".join(f"{name} = {count}" for name, count in phase.take.items())
        lines += ["[[phases]]", f"name = {_quoted(phase.name)}"]
        lines += [f"take = {{ {take} }}", ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def is_non_commercial(licence: str | None) -> bool:
    """Whether a licence's name says that commercial use is not allowed."""
    return bool(NON_COMMERCIAL.search((licence or "").replace("_", "-")))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _recipe(content: dict[str, Any], where: str) -> Recipe:
    _check_keys(content, where, needed={"datasets", "phases"})
    datasets = {
        name: _dataset(name, entry, f"{where}: datasets.{name}")
        for name, entry in _typed(content, "datasets", dict, where).items()
    }
    phases = tuple(
        _phase(entry, datasets, f"{where}: phases[{number}]")
        for number, entry in enumerate(_typed(content, "phases", list, where))
    )
    return Recipe(datasets, phases)


def _dataset(name: str, entry: Any, where: str) -> Dataset:
    if not re.fullmatch(r"[\w-]+", name):
        raise DFlash2Error(f"{where}: expected a name of letters, digits, - and _")
    forms = [form for form in FORMS if isinstance(entry, dict) and form[0] in entry]
    if len(forms) != 1:
        raise DFlash2Error(
            f"{where}: expected the columns messages, or prompt and answer, or text"
        )
    needed = {"repo", "files", *forms[0], *FACTS}
    _check_keys(entry, where, needed=needed, allowed={"revision"})
    texts = {key: _typed(entry, key, str, where) for key in entry}
    repo, at, pin = texts["repo"].partition("@")
    if at and "revision" in texts:
        raise DFlash2Error(f"{where}: repo and revision both name one; keep one")
    return Dataset(
        name,
        repo,
        pin or texts.get("revision"),
        texts["files"],
        {column: texts[column] for column in forms[0]},
        **{fact: texts[fact] for fact in FACTS},
    )


def _phase(entry: Any, datasets: dict[str, Dataset], where: str) -> Phase:
    _check_keys(entry, where, needed={"name", "take"})
    take = _typed(entry, "take", dict, where)
    for name, count in take.items():
        if name not in datasets:
            known = ", ".join(datasets)
            raise DFlash2Error(f"{where}: {name} is none of the datasets {known}")
        if type(count) is not int or count < 1:
            raise DFlash2Error(
                f"{where}: take.{name} is {count!r}, expected a whole number above 0"
            )
    return Phase(_typed(entry, "name", str, where), take)


def _check_keys(
    entry: Any, where: str, *, needed: set[str], allowed: frozenset | set = frozenset()
) -> None:
    found = set(entry) if isinstance(entry, dict) else set()
    wrong = sorted((needed - found) | (found - needed - allowed))
    if wrong:
        problem = "missing" if wrong[0] in needed else "not known"
        raise DFlash2Error(
            f"{where}: {wrong[0]} is {problem}; expected {', '.join(sorted(needed))}"
        )


def _typed(entry: dict[str, Any], key: str, kind: type, where: str) -> Any:
    if not isinstance(entry[key], kind):
        raise DFlash2Error(
            f"{where}: {key} is {entry[key]!r}, expected a {kind.__name__}"
        )
    return entry[key]
