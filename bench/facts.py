"""What identifies the files of a model that was measured."""

import hashlib
from pathlib import Path

from mlx_dflash2.checkpoint import Source, stored_tensors

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


def file_hashes(source: Source) -> dict[str, str]:
    """SHA-256 of config.json and of every file that holds weights, by name."""
    shards = {tensor.file for tensor in stored_tensors(source.folder).values()}
    files = [source.folder / "config.json", *sorted(shards)]
    return {path.name: _sha256(path) for path in files}


def tokenizer_hash(source: Source) -> str:
    """SHA-256 over names and contents of the files that make the tokenizer."""
    lines = [
        f"{name} {_sha256(source.folder / name)}\n"
        for name in TOKENIZER_FILES
        if (source.folder / name).exists()
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
