"""A target's tokenizer, chat template and end tokens, without a backend."""

import hashlib
from dataclasses import dataclass
from typing import Any

from mlx_dflash2.config_reader import read_json
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.sources import find_target
from mlx_dflash2.tokenizer_files import CONFIG, read_as_stored

TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")  # of a target, no weights


@dataclass(frozen=True)
class TargetText:
    """How a target reads text and ends its answers.

    Attributes:
        tokenizer: Of transformers.
        ends: Tokens that end decoding.
        facts: Name, revision and the hashes that tell one such target from another.
    """

    tokenizer: Any
    ends: frozenset[int]
    facts: dict[str, str | None]


def load_target_text(
    path_or_repo: str, *, revision: str | None = None, offline: bool = False
) -> TargetText:
    """Load the text side of a target from a folder or the Hub.

    Raises:
        DFlash2Error: It cannot be had, or has no chat template.
    """
    from transformers import AutoTokenizer

    source = find_target(
        path_or_repo, revision=revision, offline=offline, files=TEXT_FILES
    )
    config = read_json(source.folder / CONFIG)
    tokenizer = read_as_stored(source, config, AutoTokenizer.from_pretrained)
    if not tokenizer.chat_template:
        raise DFlash2Error(
            f"{source.name}: its tokenizer has no chat template, so its conversations "
            "cannot be written as it reads them; use an instruction-tuned target"
        )
    generation = source.folder / "generation_config.json"
    if generation.exists():
        config |= read_json(generation)
    ends = config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    facts = {
        "name": source.name,
        "revision": source.revision,
        "tokenizer_sha256": _sha256(tokenizer.backend_tokenizer.to_str()),
        "template_sha256": _sha256(tokenizer.get_chat_template()),
    }
    known = {*ends, tokenizer.eos_token_id} - {None}
    return TargetText(tokenizer, frozenset(known), facts)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
