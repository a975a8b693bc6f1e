"""The tokenizer of a target, without MLX."""

from functools import partial

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mlx_dflash2.checkpoint import Source
from mlx_dflash2.config_reader import read_json, without_code
from mlx_dflash2.tokenizer_files import read_as_stored


def load_tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """The tokenizer that a target's files describe; the same ids as on MLX.

    Raises:
        DFlash2Error: It cannot be loaded.
    """
    path = source.folder / "config.json"
    load = partial(AutoTokenizer.from_pretrained, local_files_only=True)
    return read_as_stored(source, without_code(read_json(path), path), load)
