"""Find a model folder or Hub repository, list its tensors, write a folder whole."""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .config_reader import read_json
from .errors import DFlash2Error

INDEX = "model.safetensors.index.json"
TARGET_FILES = ("*.json", "model*.safetensors", "*.txt", "*.model", "*.jinja")
DRAFTER_FILES = ("*.json", "*.safetensors")
EVERY_FILE = ("*.json", "*.safetensors", "*.md", "*.txt", "LICENSE*", "NOTICE*")


@dataclass(frozen=True)
class Source:
    """A model on disk.

    Attributes:
        folder: Where its files are.
        name: The path or repository as the user gave it.
        revision: The commit a download resolved to; None for a local folder.
    """

    folder: Path
    name: str
    revision: str | None = None


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies, and what its header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, F16, BF16, U32 ...


def find_source(
    path_or_repo: str | os.PathLike,
    *,
    revision: str | None = None,
    offline: bool = False,
    files: tuple[str, ...] = DRAFTER_FILES,
) -> Source:
    """Resolve a local folder, or download `files` of a Hub repository.

    Args:
        path_or_repo: A folder, or a repository such as `openbmb/MiniCPM5-2B`.
        revision: Branch, tag or commit of a repository.
        offline: Use the local Hub cache only; no connection is opened.
        files: Name patterns to fetch. No pattern matches Python or pickle files.

    Raises:
        DFlash2Error: Nothing of that name exists or it cannot be had.
    """
    try:
        name = os.fsdecode(path_or_repo)
    except TypeError:
        raise DFlash2Error(
            f"{path_or_repo!r}: expected a folder or a Hub repository"
        ) from None
    if not name:
        raise DFlash2Error("'': no such folder; name a folder or a Hub repository")
    try:
        folder = Path(name).expanduser()
        is_folder, exists = folder.is_dir(), folder.exists()
    except (OSError, RuntimeError) as error:  # name too long, no permission, no ~user
        reason = getattr(error, "strerror", None) or str(error)
        raise DFlash2Error(f"{name}: no folder can be had there ({reason})") from None
    if is_folder:
        if revision is not None:
            raise DFlash2Error(
                f"{name}: a local folder has no revisions; leave out revision "
                f"{revision!r} or name a Hub repository"
            )
        return Source(folder, name)
    if exists:
        raise DFlash2Error(f"{name}: expected a model folder, found a file")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        raise DFlash2Error(f"{name}: no such folder")
    return _download(name, revision, offline, files)


def _download(
    repo: str, revision: str | None, offline: bool, files: tuple[str, ...]
) -> Source:
    from huggingface_hub import constants, errors, snapshot_download

    if revision is not None and (
        ".." in revision or not re.fullmatch(r"\w[\w./+-]*", revision)
    ):
        raise DFlash2Error(
            f"{repo}: {revision!r} is not a revision; give a branch, tag or commit"
        )
    offline = offline or constants.HF_HUB_OFFLINE
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=["*/*.safetensors"],  # other formats kept in subfolders
            local_files_only=offline,
        )
    except (errors.HTTPError, OSError, ValueError) as error:
        raise explained(error, repo, revision, offline) from None
    return Source(Path(folder), repo, Path(folder).name)


def explained(
    error: Exception, repo: str, revision: str | None, offline: bool
) -> DFlash2Error:
    """What went wrong with a download, in one line."""
    from huggingface_hub import errors

    at = f"{repo}@{revision}" if revision else repo
    if isinstance(error, errors.GatedRepoError):
        reason = "access is gated; accept its terms on the Hub and run `hf auth login`"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = (
            "neither a folder here nor a repository on the Hub (if it is private, run "
            "`hf auth login`)"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = "the Hub knows no such revision"
    elif isinstance(error, errors.HFValidationError):
        reason = "no such folder, nor a repository id"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        reason = _not_cached(error, offline)
    elif isinstance(error, errors.HfHubHTTPError):
        reason = f"the Hub refused ({_first_line(error)})"
    else:
        reason = f"download failed ({_first_line(error)}); run again to resume"
    return DFlash2Error(f"{at}: {reason}")


def _not_cached(error: Exception, offline: bool) -> str:
    named = re.search(r"missing \((.+?)\)\.(?: |$)", str(error))
    if named:
        found = f"incomplete in the local Hub cache (missing {named[1]})"
    else:
        found = "no folder here and not in the local Hub cache"
    if offline:
        return f"{found}; run once without --offline and HF_HUB_OFFLINE"
    reason = f" ({_first_line(error.__cause__)})" if error.__cause__ else ""
    return f"{found}, and the Hub cannot be reached{reason}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder's safetensors files, by stored name.

    With an index only the files it lists are read, and it must agree with them.
    Without one all files are read and may not share a name.

    Raises:
        DFlash2Error: Files are missing, unreadable, or contradict each other.
    """
    index = folder / INDEX
    if index.exists():
        return _indexed_tensors(index)
    tensors: dict[str, StoredTensor] = {}
    files = sorted(folder.glob("model*.safetensors")) or sorted(
        folder.glob("*.safetensors")
    )
    _refuse_missing_shards(folder, files)
    if not files:
        pickles = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
        hint = (
            f"; {pickles[0].name} is a pickle, which may run code and is never opened"
            if pickles
            else ""
        )
        raise DFlash2Error(f"{folder}: no safetensors file{hint}")
    for file in files:
        for name, tensor in _header(file).items():
            if name in tensors:
                raise DFlash2Error(
                    f"{folder}: {name} is in {tensors[name].file.name} and in "
                    f"{file.name}, and no {INDEX} says which one counts"
                )
            tensors[name] = tensor
    return tensors


def _refuse_missing_shards(folder: Path, files: list[Path]) -> None:
    """Shards without an index still say in their names how many they are."""
    named = [re.fullmatch(r"(.+)-(\d+)-of-(\d+)\.safetensors", f.name) for f in files]
    there = {file.name for file in files}
    for stem, number, total in {match.groups() for match in named if match}:
        for index in range(1, int(total) + 1):
            shard = f"{stem}-{index:0{len(number)}}-of-{total}.safetensors"
            if shard not in there:
                raise DFlash2Error(f"{folder}: {shard} is missing; fetch it again")


def _indexed_tensors(index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DFlash2Error(f"{index}: weight_map is missing or empty")
    tensors: dict[str, StoredTensor] = {}
    for file_name in sorted(set(map(str, weight_map.values()))):
        if Path(file_name).name != file_name or "\\" in file_name:
            raise DFlash2Error(f"{index}: {file_name!r} leads outside the folder")
        if not file_name.endswith(".safetensors"):
            raise DFlash2Error(
                f"{index}: lists {file_name!r}, which is not a safetensors file; other "
                "formats are never opened"
            )
        file = index.parent / file_name
        if not file.exists():
            raise DFlash2Error(f"{index}: lists {file_name}, which is not there")
        for name, tensor in _header(file).items():
            if weight_map.get(name) is None:
                raise DFlash2Error(f"{index}: does not list {name} of {file_name}")
            if weight_map[name] == file_name:
                tensors[name] = tensor
            else:
                raise DFlash2Error(
                    f"{index}: lists {name} in {weight_map[name]}, but {file_name} "
                    "has it too"
                )
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise DFlash2Error(
            f"{index}: lists {absent[0]} in {weight_map[absent[0]]}, which does not "
            "hold it"
        )
    return tensors


def _header(file: Path) -> dict[str, StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            return {
                name: StoredTensor(file, tuple(s.get_shape()), str(s.get_dtype()))
                for name, s in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise DFlash2Error(
            f"{file}: not a complete safetensors file ({error}); fetch it again"
        ) from None


def refuse_existing(destination: Path) -> None:
    """Raise DFlash2Error if `destination` exists: nothing is ever overwritten."""
    try:
        taken = destination.exists() or destination.is_symlink()
    except OSError as error:
        raise DFlash2Error(
            f"{destination}: cannot be written ({error.strerror})"
        ) from None
    if taken:
        raise DFlash2Error(
            f"{destination}: already exists; choose another name or remove it first"
        )


def _make_readable(folder: Path) -> None:
    """Let whoever may read the folder read its files.

    safetensors makes files that only their owner may read.
    """
    for file in folder.iterdir():
        if file.is_file() and not file.is_symlink():
            file.chmod(folder.stat().st_mode & 0o666)


@contextlib.contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A folder to write into that takes its final name only when all is written.

    It lies beside `destination` as `.NAME.partial-XXXXXXXX`; an error removes it, a
    kill leaves it under that name.
    """
    refuse_existing(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        partial = destination.with_name(
            f".{destination.name}.partial-{secrets.token_hex(4)}"
        )
        partial.mkdir()
    except OSError as error:
        raise DFlash2Error(
            f"{destination}: cannot be written ({error.strerror})"
        ) from None
    try:
        yield partial
        _make_readable(partial)
        refuse_existing(destination)
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
