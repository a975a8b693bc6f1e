"""A tokenizer as its folder describes it: nothing misread, no code."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .checkpoint import Source
from .config_reader import read_json, without_code
from .errors import DFlash2Error

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"


def read_as_stored(source: Source, config: dict, load: Callable[[Path], Any]):
    """Load a tokenizer from a view of the folder without code.

    The class that transformers picks may replace what tokenizer.json says: a llama
    class loses the spaces of a byte-level file. The file is then read as it is.

    Args:
        config: The model's settings, as the view shall have them.
        load: The backend's way to load a folder.

    Raises:
        DFlash2Error: It cannot be loaded.
    """
    with tempfile.TemporaryDirectory(prefix="mlx-dflash2-") as temporary:
        view = Path(temporary)
        for path in source.folder.iterdir():
            if path.suffix != ".py" and path.name not in (CONFIG, TOKENIZER_CONFIG):
                (view / path.name).symlink_to(path.resolve())
        (view / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        path = source.folder / TOKENIZER_CONFIG
        settings = without_code(read_json(path), path) if path.exists() else {}
        try:
            tokenizer = _tokenizer_of(view, settings, load)
            if _loses_text(tokenizer, view / "tokenizer.json"):
                settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
                tokenizer = _tokenizer_of(view, settings, load)
        except Exception as error:  # of any type: a library in Rust raises plain ones
            reason = " ".join(str(error).split())[:300]
            raise DFlash2Error(
                f"{source.name}: its tokenizer cannot be loaded: {reason}"
            ) from error
    return tokenizer


def _tokenizer_of(view: Path, settings: dict, load: Callable[[Path], Any]):
    content = json.dumps(settings)
    (view / TOKENIZER_CONFIG).write_text(content, encoding="utf-8")
    return load(view)


def _loses_text(tokenizer, file: Path) -> bool:
    """Whether a text survives the tokenizer of `file`, but not the loaded one."""
    from tokenizers import Tokenizer

    if not file.exists():
        return False
    text = "a b  c\n\td"
    plain = Tokenizer.from_file(str(file))
    kept = plain.decode(plain.encode(text, add_special_tokens=False).ids)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return kept == text != tokenizer.decode(ids)
