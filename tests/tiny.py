"""A tiny drafter and a tiny llama target, in both backends from the same numbers.

Numbers are float32 arrays under the published names, drawn with a fixed seed: norms
1 + 0.2 N, linear weights 1.3 N / sqrt(fan-in), convolution bases identity + 0.3 N,
embeddings, codebooks and Markov tables N. N is the standard normal distribution.
"""

import copy
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mlx_dflash2.checkpoint import Source
from mlx_dflash2.config import DrafterConfig
from mlx_dflash2.config_fields import FULL, SLIDING
from mlx_dflash2.families import FAMILIES
from mlx_dflash2.names import expected_shapes

Numbers = dict[str, np.ndarray]

KINDS = {family.kind: family for family in FAMILIES}
WINDOW = 12
LAYER_TYPES = {
    "full": [FULL, FULL],
    "sliding": [SLIDING, SLIDING],
    "mixed": [SLIDING, FULL],
}

DRAFTER = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"},
    "num_target_layers": 4,
}
COMMON = {"mask_token_id": 255, "target_layer_ids": [0, 2]}
OWN = {  # what each family's config.json has of its own; seven tokens a block
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": COMMON
        | {
            "block_size": 8,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": 4,
        },
    },
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "block_size": 8,
        "dflash_config": COMMON,
    },
    "dspark": COMMON
    | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "dflash_config": {},
    },
}

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
}


def drafter_raw(layers: str = "full", family: str = "dflash2", **changes) -> dict:
    """A drafter's config.json.

    Args:
        layers: A key of LAYER_TYPES.
        family: A key of OWN.
        changes: Fields to set; those of `dflash_config` by their own name, and
            softcap, multiplier and embedding scale go there too.
    """
    raw = copy.deepcopy(DRAFTER | OWN[family])
    raw["layer_types"] = LAYER_TYPES[layers]
    if layers != "full":
        raw["sliding_window"] = WINDOW
    nested = {
        *raw["dflash_config"],
        *("final_logit_softcapping", "output_multiplier", "input_embedding_scale"),
    }
    for name, value in changes.items():
        (raw["dflash_config"] if name in nested else raw)[name] = value
    return raw


def drafter_config(
    layers: str = "full", family: str = "dflash2", **changes
) -> DrafterConfig:
    return KINDS[family].from_dict(drafter_raw(layers, family, **changes))


def drafter_numbers(config: DrafterConfig, seed: int = 0) -> Numbers:
    """Every tensor a drafter of this config has."""
    generator = np.random.default_rng(seed)
    return {
        name: _draw(generator, name, shape)
        for name, shape in expected_shapes(config).items()
    }


def _draw(generator: np.random.Generator, name: str, shape: tuple) -> np.ndarray:
    noise = generator.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        return 1 + np.float32(0.2) * noise
    if name.endswith("base_kernel"):
        identity = np.zeros(shape, np.float32)
        identity[:, 0] = 1
        return identity + np.float32(0.3) * noise
    if "codebook" in name or "embed_tokens" in name or "markov" in name:
        return noise
    return noise * np.float32(1.3 / np.sqrt(shape[-1]))


def with_identity_convs(numbers: Numbers) -> Numbers:
    """The same numbers, the convolutions passing everything through."""
    numbers = dict(numbers)
    for name, value in numbers.items():
        if name.endswith("base_kernel"):
            numbers[name] = np.zeros_like(value)
            numbers[name][:, 0] = 1
        elif "kernel_projection" in name:
            numbers[name] = np.zeros_like(value)
    return numbers


def features_of(config: DrafterConfig, rows: int, seed: int = 1) -> np.ndarray:
    """Random context features. Shape: (1, rows, T*D)."""
    width = len(config.target_layer_ids) * config.hidden_size
    generator = np.random.default_rng(seed)
    return generator.standard_normal((1, rows, width), dtype=np.float32)


def target_numbers(config: Mapping = TARGET, seed: int = 2) -> Numbers:
    """Every tensor of a llama target of this config."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    pairs = config["num_key_value_heads"] * config["head_dim"]
    vocab = config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, size), "model.norm.weight": (size,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, size)
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (size,),
            "post_attention_layernorm": (size,),
            "self_attn.q_proj": (heads, size),
            "self_attn.k_proj": (pairs, size),
            "self_attn.v_proj": (pairs, size),
            "self_attn.o_proj": (size, heads),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }
        stem = f"model.layers.{index}"
        shapes |= {f"{stem}.{name}.weight": shape for name, shape in layer.items()}
    generator = np.random.default_rng(seed)
    return {name: _draw(generator, name, shape) for name, shape in shapes.items()}


def torch_drafter(config: DrafterConfig, numbers: Numbers, **own):
    """A torch drafter; `own` as its constructor takes it."""
    import torch

    drafter = config.network("mlx_dflash2.torch")(config, **own)
    drafter.load_state_dict({n: torch.from_numpy(a) for n, a in numbers.items()})
    return drafter.requires_grad_(False).eval()


def torch_target(config: Mapping = TARGET, numbers: Numbers | None = None):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from mlx_dflash2.torch.target import Target

    model = LlamaForCausalLM(LlamaConfig.from_dict(dict(config)))
    weights = {
        name: torch.from_numpy(array)
        for name, array in (numbers or target_numbers(config)).items()
    }
    if config["tie_word_embeddings"]:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return Target(model)


def mlx_drafter(config: DrafterConfig, numbers: Numbers, **own):
    """An MLX drafter; `own` as its constructor takes it."""
    import mlx.core as mx

    drafter = config.network("mlx_dflash2")(config, **own)
    drafter.load_weights([(n, mx.array(a)) for n, a in numbers.items()], strict=True)
    return drafter


def mlx_target(config: Mapping = TARGET, numbers: Numbers | None = None):
    import mlx.core as mx
    from mlx_lm.models.llama import Model, ModelArgs

    from mlx_dflash2.target import Target

    model = Model(ModelArgs.from_dict(dict(config)))
    numbers = numbers or target_numbers(config)
    model.load_weights([(n, mx.array(a)) for n, a in numbers.items()], strict=True)
    return Target(model, dict(config), Source(Path("tiny"), "tiny"))


def assert_close(ours, theirs, tolerance: float, *, what: str = "") -> None:
    """Compare arrays of either backend; a failure names the largest gap and where."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape, f"{what} shapes {ours.shape}, {theirs.shape}"
    assert np.isfinite(ours).all() and np.isfinite(theirs).all(), f"{what} not finite"
    gaps = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    index = np.unravel_index(gaps.argmax(), gaps.shape)
    assert gaps[index] <= tolerance, (
        f"{what} largest gap {gaps[index]:.3g} at {tuple(map(int, index))}: "
        f"{ours[index]:.6g} and {theirs[index]:.6g}, tolerance {tolerance:g}"
    )
