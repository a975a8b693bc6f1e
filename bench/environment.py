"""The machine a bench ran on, as far as the system tells."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("mlx-dflash2", "mlx", "mlx-lm", "torch", "transformers", "numpy")


def describe_machine() -> dict[str, Any]:
    """Machine, processor, cores, memory, system, versions of packages, and the date."""
    return {
        "machine": _sysctl("hw.model") or platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(_memory() / 1e9, 1),
        "system": _system(),
        "versions": {"python": platform.python_version(), **_versions()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    from mlx_dflash2 import __version__

    return found | {"mlx-dflash2": __version__}


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, {platform.system()} {platform.release()}"


def _processor() -> str:
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _sysctl(name: str) -> str | None:
    """A value of macOS's sysctl; None elsewhere."""
    if sys.platform != "darwin":
        return None
    found = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True)
    return found.stdout.strip() or None
