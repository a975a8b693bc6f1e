"""SmolLM2's GGUF file as an ordinary model folder."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import save_file

GROUP = 32  # values per group of a Q4 or Q8 tensor
CONTROL = 3  # the token type of special tokens

WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
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


def write_model(gguf: Path, out: Path, *, quantized: bool = False) -> None:
    """Unpack a GGUF file into the existing folder `out`, its floats in float32.

    Args:
        quantized: Keep the file's own groups as an MLX quantized checkpoint.
    """
    stored, meta = mx.load(str(gguf), return_metadata=True)
    config = _config(meta) | {"dtype": "float32"}
    tensors, bits = {}, {}
    for stem in sorted({name.rsplit(".", 1)[0] for name in stored}):
        name = published_stem(stem)
        parts = _parts(stored, stem, _heads(name, config))
        if "scales" in parts:
            bits[name] = _bits(parts)
            if not quantized:
                parts = {"weight": _dequantized(parts)}
        tensors |= {f"{name}.{suffix}": part for suffix, part in parts.items()}
    if quantized:
        config["quantization"] = _quantization(bits)
    arrays = {
        n: np.asarray(t if t.dtype == mx.uint32 else t.astype(mx.float32))
        for n, t in tensors.items()
    }
    form = "mlx" if quantized else "pt"
    # MLX would write them in an order that is another on macOS than on Linux.
    save_file(arrays, out / "model.safetensors", metadata={"format": form})
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    for name, content in (("config", config), ("generation_config", special)):
        text = json.dumps(content, indent=1) + "\n"
        (out / f"{name}.json").write_text(text, encoding="utf-8")
    _write_tokenizer(meta, out)


def published_stem(stem: str) -> str:
    """The Hugging Face name of a GGUF tensor, both without their suffix."""
    if stem in WHOLE:
        return WHOLE[stem]
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{PARTS[part]}"


def halves(rows: mx.array, heads: int) -> mx.array:
    """Rows of q or k as halves of a head; GGUF stores rotary pairs side by side."""
    size = rows.shape[0] // heads
    pairs = rows.reshape(heads, size // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _heads(name: str, config: dict) -> int | None:
    """How many heads share the rows of a tensor that is rotated; None of another."""
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    return config.get(counts.get(name.rsplit(".", 1)[-1]))


def _parts(stored: dict, stem: str, heads: int | None) -> dict[str, mx.array]:
    """A tensor's weight, with scales and biases when it is quantized."""
    parts = {
        suffix: stored[f"{stem}.{suffix}"]
        for suffix in ("weight", "scales", "biases")
        if f"{stem}.{suffix}" in stored
    }
    if heads:
        parts = {suffix: halves(part, heads) for suffix, part in parts.items()}
    return parts


def _bits(parts: dict[str, mx.array]) -> int:
    words, groups = parts["weight"].shape[1], parts["scales"].shape[1]
    return words * 32 // (groups * GROUP)


def _dequantized(parts: dict[str, mx.array]) -> mx.array:
    return mx.dequantize(
        parts["weight"],
        parts["scales"].astype(mx.float32),
        parts["biases"].astype(mx.float32),
        group_size=GROUP,
        bits=_bits(parts),
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


def _config(meta: dict) -> dict:
    def number(name: str) -> float:
        return meta[f"llama.{name}"].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "head_dim": number("rope.dimension_count"),
        "vocab_size": number("vocab_size"),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base"),
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
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
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
