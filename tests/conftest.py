"""What every test shares: the device, the import path, pairs of models on disk."""

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

# Before anything imports mlx_lm: it picks its stream from the default device once.
if os.environ.get("MLX_DFLASH2_TEST_DEVICE", "cpu") == "gpu":
    mx.set_default_device(mx.gpu)
else:
    mx.set_default_device(mx.cpu)

ROOT = Path(__file__).resolve().parent.parent


def _find_rooms_of_a_checkout() -> None:
    """Without an install, `mlx_dflash2.convert` is the folder `convert` of the root."""
    import mlx_dflash2

    if importlib.util.find_spec("mlx_dflash2.convert") is None:
        mlx_dflash2.__path__.append(str(ROOT))


_find_rooms_of_a_checkout()

from pairs import Pair, write_pair  # noqa: E402


@pytest.fixture(scope="session")
def pair(tmp_path_factory) -> Callable[..., Pair]:
    """`pair(kind="oracle", **options)`: a target and a drafter on disk.

    Equal options give the same folder, written once a session: read it only, or copy
    it first. `pairs.PairOptions` lists the options.
    """
    made: dict[str, Pair] = {}

    def make(kind: str = "oracle", **options) -> Pair:
        key = json.dumps({"kind": kind, **options}, sort_keys=True, default=list)
        if key not in made:
            made[key] = write_pair(
                tmp_path_factory.mktemp("pair") / "pair", kind=kind, **options
            )
        return made[key]

    return make


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct in float32, unpacked once a session."""
    from mlx_dflash2.demo import demo_target

    return demo_target(tmp_path_factory.mktemp("smollm2"), offline=True)
