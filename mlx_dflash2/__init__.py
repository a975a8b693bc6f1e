"""Lossless speculative decoding with DFlash, DFlash 2 and DSpark drafters on MLX."""

import importlib

__version__ = "0.1.0"

_HOMES = {  # each public name is imported from its module on first use
    "AcceptanceStats": "stats",
    "DFlash2Drafter": "dflash2",
    "DFlash2Error": "errors",
    "Drafter": "drafter",
    "DrafterConfig": "config",
    "Generation": "generation",
    "Target": "target",
    "generate": "generation",
    "load_drafter": "loading",
    "load_target": "loading",
    "stream_generate": "generation",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
