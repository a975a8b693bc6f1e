"""The spellings drafters are published in, made from one plain drafter.

A dialect turns a plain config.json and tensors into its own: the same drafter, said in
other words.
"""

import copy
from collections.abc import Callable

import numpy as np
from tiny import OWN, Numbers, target_numbers

Dialect = Callable[[dict, Numbers], tuple[dict, Numbers]]

PLAIN = "DFlashDraftModel"
SETTINGS = (
    *("block_size", "mask_token_id", "target_layer_ids"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("markov_rank", "markov_head_type", "enable_confidence_head"),
    "confidence_head_with_markov",
)


def settings_of(raw: dict) -> dict:
    """A plain config's drafting settings, wherever they are."""
    everywhere = raw | raw["dflash_config"]
    return {name: everywhere[name] for name in SETTINGS if name in everywhere}


def without_settings(raw: dict) -> dict:
    left_out = {*SETTINGS, "dflash_config", "architectures"}
    return {name: raw[name] for name in raw if name not in left_out}


def serving(raw: dict, numbers: Numbers) -> tuple[dict, Numbers]:
    """z-lab, SGLang, vLLM: a flat Qwen3 config, and all drafting in `dflash_config`."""
    families = {OWN[name]["architectures"][0]: name for name in OWN}
    family = families[raw["architectures"][0]]
    projector = {"projector_type": family} if family == "dspark" else {}
    written = without_settings(raw) | {
        "architectures": ["DFlash2DraftModel" if family == "dflash2" else PLAIN],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "rope_theta": raw["rope_parameters"]["rope_theta"],
        "rope_scaling": None,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "dflash_config": settings_of(raw) | projector,
    }
    del written["rope_parameters"]
    return written, numbers


def flat(raw: dict, numbers: Numbers) -> tuple[dict, Numbers]:
    """Every setting at the top level, in none of them a nested part."""
    written = without_settings(raw) | settings_of(raw)
    return written | {"architectures": raw["architectures"]}, numbers


def standalone(raw: dict, numbers: Numbers) -> tuple[dict, Numbers]:
    """DeepSpec: a copy of the target's config with DSpark's fields at the top level.

    The rope base stands under `rope_parameters` only, an equal draft vocabulary comes
    without a table, and `auto_map` names a file that is not there.
    """
    written, numbers = flat(raw, numbers)
    return written | {
        "architectures": ["Qwen3DSparkModel"],
        "auto_map": {"AutoModel": "modeling_dspark.Qwen3DSparkModel"},
        "model_type": "qwen3",
        "draft_vocab_size": raw["vocab_size"],
        "rope_theta": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 42,
        "tie_word_embeddings": False,
        "eos_token_id": [1, 2],
        "dtype": "float32",
    }, numbers


def prefixed(raw: dict, numbers: Numbers) -> tuple[dict, Numbers]:
    """DSpark's settings under names that begin with `dspark_`, heads in their part."""
    said = settings_of(raw)
    written = without_settings(raw) | {
        "dspark_block_size": said.pop("block_size"),
        "dspark_noise_token_id": said.pop("mask_token_id"),
        "dspark_target_layer_ids": said.pop("target_layer_ids"),
        "dspark_config": said | {"logits_start": 0},
    }
    return written, numbers


TRAINED = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}


def training(raw: dict, numbers: Numbers) -> tuple[dict, Numbers]:
    """SpecForge, Draftfit: a model type of its own and everything said twice.

    `num_target_layers` counts the taps; the depth has a field of its own.
    """
    written, numbers = flat(raw, numbers)
    del written["architectures"]
    nested = settings_of(raw)
    written |= {
        "model_type": "qwen3_dflash2",
        "rope_theta": raw["rope_parameters"]["rope_theta"],
        "num_target_layers": len(nested["target_layer_ids"]),
        "target_num_hidden_layers": raw["num_target_layers"],
        "dflash_config": nested,
    }
    return written, renamed(numbers, TRAINED)


def model_prefix(raw: dict, numbers: Numbers) -> tuple[dict, Numbers]:
    return raw, {f"model.{name}": array for name, array in numbers.items()}


def encoder_names(raw: dict, numbers: Numbers) -> tuple[dict, Numbers]:
    """Other names for the fusion, and buffers that carry nothing."""
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    buffers = {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    return raw, renamed(numbers, names) | buffers


def embedding_names(raw: dict, numbers: Numbers) -> tuple[dict, Numbers]:
    """Codebooks spelled as the weights of embeddings."""
    names = {name: f"{name}.weight" for name in numbers if name.endswith("codebook")}
    return raw, renamed(numbers, names)


def own_tables(raw: dict, numbers: Numbers) -> tuple[dict, Numbers]:
    """Copies of the target's embedding and head in the drafter's file."""
    lent = target_numbers()
    return raw, numbers | {
        "embed_tokens.weight": lent["model.embed_tokens.weight"],
        "lm_head.weight": lent["lm_head.weight"],
    }


def own_head(raw: dict, numbers: Numbers) -> tuple[dict, Numbers]:
    return raw, numbers | {"lm_head.weight": target_numbers()["lm_head.weight"]}


def renamed(numbers: Numbers, names: dict[str, str]) -> Numbers:
    return {names.get(name, name): array for name, array in numbers.items()}


ANY = (serving, flat, training, model_prefix, encoder_names, own_tables, own_head)
DIALECTS: dict[str, tuple[Dialect, ...]] = {
    "dflash2": (*ANY, embedding_names),
    "dflash": ANY,
    "dspark": (*ANY, standalone, prefixed),
}


def spoken(dialect: Dialect, raw: dict, numbers: Numbers) -> tuple[dict, Numbers]:
    """A drafter in a dialect; what is given stays as it is."""
    return dialect(copy.deepcopy(raw), dict(numbers))
