"""Writes a matched pair of checkpoints: a llama target and a drafter of any family.

    pair = write_pair(folder, kind="oracle", partial=0.2)
    pair.target, pair.drafter       # folders that mlx_lm and this package load
    pair.oracle.walk(prompt, 64)    # what greedy decoding must give, without a model

A "random" pair has weights at a scale that keeps activations sane, so two
implementations can be compared number by number; its drafter knows nothing of the
target. An "oracle" pair has weights set by hand; `oracle.py` says what it computes.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from oracle import Oracle, build_oracle
from pair_files import (
    BOS,
    EOS,
    EOS2,
    MASK,
    PAD,
    write_checkpoint,
    write_json,
    write_tokenizer,
)

PRESETS = {
    "tiny": dict(
        hidden=96, layers=4, intermediate=128, heads=4, kv_heads=2, head_dim=32
    )
    | dict(vocab=512, draft_layers=2, rank=64),
    "small": dict(
        hidden=256, layers=8, intermediate=640, heads=8, kv_heads=2, head_dim=32
    )
    | dict(vocab=4096, draft_layers=3, rank=64),
    "medium": dict(
        hidden=768, layers=16, intermediate=2048, heads=12, kv_heads=2, head_dim=64
    )
    | dict(vocab=32768, draft_layers=5, rank=128),
    # The real layer count at a toy width: what the host does per layer is real.
    "deep": dict(
        hidden=96, layers=42, intermediate=128, heads=16, kv_heads=2, head_dim=32
    )
    | dict(vocab=512, draft_layers=5, rank=64),
}


@dataclass(frozen=True)
class PairOptions:
    """What a pair is made of; sizes left at 0 come from the preset.

    Attributes:
        family: Of the drafter: "dflash2", "dflash" or "dspark".
        partial: Oracle: fraction of tokens after which the drafter goes wrong.
        lag: Oracle: how far back the rule looks; 0 for one that makes every slot right.
        eos: Oracle: "ring" ends a walk on one of two neighbouring ids, "off" never.
        logit_margin: Oracle: nats between the right token and the best wrong one.
        max_ctx: Oracle: contexts it must be exact for.
        shards, draft_shards: Files per checkpoint, with an index above one.
        tokenizer: "bytelevel", "wordlevel"; "" for the first that fits.
        thinking: `<think>`, `</think>` are ids 6, 7; the template has three endings.
        template_bos: The template emits `<s>`, and plain encoding adds it as well.
        target_rope, rope: "flat", "nested" or "both" places of rope_theta.
        block_size: As the family's config counts; 0 for 8, or DSpark's 7.
        block_size_at: "nested", "top" or "both" places of block_size; "" as published.
        first_row: Row of the first prediction, written when it is given.
        confidence: DSpark: there is a confidence head.
        taps: Target layers the drafter reads; () spreads `n_taps` of them.
        layer_types: "full", "sliding", "mixed" (last one full) or letters as "ssf".
        is_causal: Written when not None.
        target_config, draft_config: Merged into the config.json files at the end;
            None removes a field, `dflash_config` is merged field by field.
    """

    kind: str = "oracle"
    family: str = "dflash2"
    preset: str = "tiny"
    seed: int = 0
    dtype: str = "float32"
    partial: float = 0.0
    lag: int = 0
    eos: str = "ring"
    logit_margin: float = 8.0
    max_ctx: int = 32768
    tied: bool = False
    shards: int = 1
    draft_shards: int = 1
    tokenizer: str = ""
    thinking: bool = False
    template_bos: bool = False
    hidden: int = 0
    layers: int = 0
    intermediate: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    vocab: int = 0
    draft_layers: int = 0
    draft_heads: int = 0
    draft_kv_heads: int = 0
    draft_head_dim: int = 0
    draft_intermediate: int = 0
    rank: int = 0
    rope_theta: float = 10000.0
    draft_rope_theta: float = 0.0
    target_rope: str = "flat"
    rope: str = "flat"
    block_size: int = 0
    block_size_at: str = ""
    first_row: int | None = None
    confidence: bool = True
    top_k: int = 16
    conv_kernel: int = 2
    conv_group: int = 16
    taps: tuple[int, ...] = ()
    n_taps: int = 5
    layer_types: str = "full"
    sliding_window: int = 128
    is_causal: bool | None = None
    max_positions: int = 131072
    eos_token_ids: tuple[int, ...] = (EOS, EOS2)
    target_config: dict = field(default_factory=dict)
    draft_config: dict = field(default_factory=dict)

    def resolved(self) -> "PairOptions":
        """With every size filled in and checked."""
        sizes = {
            name: getattr(self, name) or value
            for name, value in PRESETS[self.preset].items()
        }
        for name in ("heads", "kv_heads", "head_dim", "intermediate"):
            sizes[f"draft_{name}"] = getattr(self, f"draft_{name}") or sizes[name]
        count = min(self.n_taps, sizes["layers"])
        first_row = int(self.family != "dspark")
        block = self.block_size or (7 if self.family == "dspark" else 8)
        done = replace(
            self,
            **sizes,
            block_size=block,
            first_row=first_row if self.first_row is None else self.first_row,
            lag=self.lag or (max(block - 2, 1) if self.copies else max(block, 8)),
            draft_rope_theta=self.draft_rope_theta or self.rope_theta,
            taps=tuple(self.taps) or spread_taps(sizes["layers"], count),
            tokenizer=self.tokenizer
            or ("bytelevel" if sizes["vocab"] >= 300 else "wordlevel"),
        )
        if any(not 0 <= tap < done.layers for tap in done.taps):
            raise ValueError(f"taps {done.taps} outside the {done.layers} layers")
        if done.hidden % done.conv_group:
            raise ValueError("conv_group must divide hidden")
        if done.vocab < (64 if done.kind == "oracle" else 16):
            raise ValueError(f"a vocabulary of {done.vocab} is too small")
        return done

    @property
    def copies(self) -> bool:
        """Whether the oracle's rule is the copy of DFlash pairs."""
        return self.family == "dflash"

    @property
    def drafted(self) -> int:
        """Tokens of one block."""
        return self.block_size - self.first_row

    @property
    def layer_type_list(self) -> list[str]:
        """`layer_types` spelled out, one entry per drafter layer."""
        names = {"s": "sliding_attention", "f": "full_attention"}
        last = self.draft_layers - 1
        letters = {
            "full": "f" * self.draft_layers,
            "sliding": "s" * self.draft_layers,
            "mixed": "s" * last + "f",
        }.get(self.layer_types, self.layer_types)
        if len(letters) != self.draft_layers:
            raise ValueError(f"{letters!r} does not name {self.draft_layers} layers")
        return [names[letter] for letter in letters]


@dataclass(frozen=True)
class Pair:
    """Two folders and how they were made.

    Attributes:
        oracle: What an oracle pair must do; None for a random pair.
        margins: How far apart right and wrong scores of an oracle pair are.
    """

    target: Path
    drafter: Path
    options: PairOptions
    oracle: Oracle | None = None
    margins: dict[str, float] | None = None


def write_pair(out: Path, **options) -> Pair:
    """Write `out/target` and `out/drafter`; `options` are those of PairOptions."""
    given = PairOptions(**options)
    opts = given.resolved()
    target, drafter = Path(out) / "target", Path(out) / "drafter"
    target.mkdir(parents=True)
    drafter.mkdir()
    oracle = margins = None
    if opts.kind == "oracle":
        oracle = Oracle.of(opts)
        target_weights, drafter_weights, margins = build_oracle(opts)
    elif opts.kind == "random":
        rng = np.random.default_rng(opts.seed)
        target_weights = random_target(rng, opts)
        drafter_weights = random_drafter(rng, opts)
    else:
        raise ValueError(f"kind {opts.kind!r} is neither 'oracle' nor 'random'")
    write_checkpoint(target, target_weights, opts.dtype, opts.shards)
    write_checkpoint(drafter, drafter_weights, opts.dtype, opts.draft_shards)
    ends = {
        "bos_token_id": BOS,
        "eos_token_id": list(opts.eos_token_ids),
        "pad_token_id": PAD,
    }
    write_json(
        target / "config.json", _merged(target_config(opts) | ends, opts.target_config)
    )
    write_json(target / "generation_config.json", ends | {"do_sample": False})
    write_json(
        drafter / "config.json",
        _merged(drafter_config(opts) | _first_row(given), opts.draft_config),
    )
    write_tokenizer(
        target,
        opts.vocab,
        opts.tokenizer,
        max_length=opts.max_positions,
        thinking=opts.thinking,
        template_bos=opts.template_bos,
    )
    return Pair(target, drafter, opts, oracle, margins)


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """Taps spread over the depth as published drafters do, none on the last layer."""
    if count == 1:
        return (layers // 2,)
    first, last = (1, layers - 3) if layers >= count + 4 else (0, layers - 2)
    step = (last - first) / (count - 1)
    return tuple(sorted({round(first + i * step) for i in range(count)}))


def _merged(config: dict, changes: dict) -> dict:
    for name, value in changes.items():
        if name == "dflash_config" and value is not None:
            value = _merged(dict(config.get(name, {})), value)
        config[name] = value
        if value is None:
            del config[name]
    return config


def _first_row(given: PairOptions) -> dict:
    if given.first_row is None:
        return {}
    if given.family == "dspark":
        return {"sample_from_anchor": given.first_row == 0}
    return {"logits_start": given.first_row}


def _rope(style: str, theta: float) -> dict:
    flat = {"rope_theta": theta, "rope_scaling": None}
    nested = {"rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    return {"flat": flat, "nested": nested, "both": flat | nested}[style]


def target_config(opts: PairOptions) -> dict:
    """config.json of the target, in Hugging Face's llama spelling."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": opts.hidden,
        "num_hidden_layers": opts.layers,
        "intermediate_size": opts.intermediate,
        "num_attention_heads": opts.heads,
        "num_key_value_heads": opts.kv_heads,
        "head_dim": opts.head_dim,
        "vocab_size": opts.vocab,
        "rms_norm_eps": 1e-6,
        **_rope(opts.target_rope, opts.rope_theta),
        "max_position_embeddings": opts.max_positions,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": opts.tied,
        "torch_dtype": opts.dtype,
    }


def drafter_config(opts: PairOptions) -> dict:
    """config.json of the drafter, in its family's published spelling."""
    types = opts.layer_type_list
    slides = "sliding_attention" in types
    config = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": opts.hidden,
        "num_hidden_layers": opts.draft_layers,
        "intermediate_size": opts.draft_intermediate,
        "num_attention_heads": opts.draft_heads,
        "num_key_value_heads": opts.draft_kv_heads,
        "head_dim": opts.draft_head_dim,
        "vocab_size": opts.vocab,
        "rms_norm_eps": 1e-6,
        **_rope(opts.rope, opts.draft_rope_theta),
        "attention_bias": False,
        "max_position_embeddings": opts.max_positions,
        "num_target_layers": opts.layers,
        "layer_types": types,
        "use_sliding_window": slides,
        "sliding_window": opts.sliding_window if slides else None,
        "tie_word_embeddings": False,
        "torch_dtype": opts.dtype,
        **_family_fields(opts),
    }
    if opts.is_causal is not None:
        config["is_causal"] = opts.is_causal
    return config


def _family_fields(opts: PairOptions) -> dict:
    """What a family's config says of block, taps and its own parts."""
    block = {"mask_token_id": MASK, "target_layer_ids": list(opts.taps)}
    if opts.family == "dspark":
        return block | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": opts.block_size,
            "draft_vocab_size": opts.vocab,
            "markov_rank": opts.rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": opts.confidence,
            "confidence_head_with_markov": opts.confidence,
        }
    fields = {"architectures": ["DFlashDraftModel"], "dflash_config": block}
    place = opts.block_size_at or "top"
    if opts.family == "dflash2":
        fields["architectures"] = ["DFlash2DraftModel"]
        place = opts.block_size_at or "nested"
        block |= {
            "conv_kernel_size": opts.conv_kernel,
            "conv_group_size": opts.conv_group,
            "selector_rank": opts.rank,
            "selector_top_k": opts.top_k,
        }
    if place in ("nested", "both"):
        block["block_size"] = opts.block_size
    if place in ("top", "both"):
        fields["block_size"] = opts.block_size
    return fields


def linear(
    rng: np.random.Generator, rows: int, columns: int, gain: float = 1.0
) -> np.ndarray:
    """A [rows, columns] weight; outputs are about `gain` times its inputs."""
    scale = gain / math.sqrt(columns)
    return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)


def near_one(rng: np.random.Generator, size: int) -> np.ndarray:
    """A norm weight around 1."""
    return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)


def random_target(rng: np.random.Generator, opts: PairOptions) -> dict[str, np.ndarray]:
    """Weights of a llama target whose next token depends on its whole context."""
    size, inner = opts.hidden, opts.intermediate
    queries, pairs = opts.heads * opts.head_dim, opts.kv_heads * opts.head_dim
    depth = 1 / math.sqrt(opts.layers)
    embedding = rng.standard_normal((opts.vocab, size)).astype(np.float32)
    weights = {"model.embed_tokens.weight": embedding}
    for i in range(opts.layers):
        layer = {
            "input_layernorm.weight": near_one(rng, size),
            "self_attn.q_proj.weight": linear(rng, queries, size, 1.5),
            "self_attn.k_proj.weight": linear(rng, pairs, size, 1.5),
            "self_attn.v_proj.weight": linear(rng, pairs, size),
            "self_attn.o_proj.weight": linear(rng, size, queries, depth),
            "post_attention_layernorm.weight": near_one(rng, size),
            "mlp.gate_proj.weight": linear(rng, inner, size),
            "mlp.up_proj.weight": linear(rng, inner, size),
            "mlp.down_proj.weight": linear(rng, size, inner, depth),
        }
        weights |= {f"model.layers.{i}.{name}": w for name, w in layer.items()}
    weights["model.norm.weight"] = near_one(rng, size)
    if not opts.tied:
        weights["lm_head.weight"] = linear(rng, opts.vocab, size, 3.0)
    return weights


def random_drafter(
    rng: np.random.Generator, opts: PairOptions, *, identity_convolutions: bool = False
) -> dict[str, np.ndarray]:
    """Weights of a drafter, codebooks in the published bare spelling."""
    size, inner, head = opts.hidden, opts.draft_intermediate, opts.draft_head_dim
    queries, pairs = opts.draft_heads * head, opts.draft_kv_heads * head
    weights = {
        "fc.weight": linear(rng, size, len(opts.taps) * size),
        "hidden_norm.weight": near_one(rng, size),
    }
    for i in range(opts.draft_layers):
        layer = {
            "input_layernorm.weight": near_one(rng, size),
            "self_attn.q_proj.weight": linear(rng, queries, size),
            "self_attn.k_proj.weight": linear(rng, pairs, size),
            "self_attn.v_proj.weight": linear(rng, pairs, size),
            "self_attn.o_proj.weight": linear(rng, size, queries),
            "self_attn.q_norm.weight": near_one(rng, head),
            "self_attn.k_norm.weight": near_one(rng, head),
            "post_attention_layernorm.weight": near_one(rng, size),
            "mlp.gate_proj.weight": linear(rng, inner, size),
            "mlp.up_proj.weight": linear(rng, inner, size),
            "mlp.down_proj.weight": linear(rng, size, inner),
        }
        convolutions = ("attention_conv", "mlp_conv")
        for name in convolutions if opts.family == "dflash2" else ():
            kernels = random_convolution(rng, opts, 0.0 if identity_convolutions else 1)
            layer |= {f"{name}.{part}": array for part, array in kernels.items()}
        weights |= {f"layers.{i}.{name}": w for name, w in layer.items()}
    weights["norm.weight"] = near_one(rng, size)
    if opts.family == "dspark":
        return weights | random_heads(rng, opts)
    if opts.family == "dflash":
        return weights
    selector = {
        "predecessor_codebook": rng.standard_normal((opts.vocab, opts.rank)),
        "successor_codebook": rng.standard_normal((opts.vocab, opts.rank)),
        "hidden_projection.weight": linear(
            rng, opts.rank, size, 3 / math.sqrt(opts.rank)
        ),
    }
    return weights | {
        f"candidate_selector.{name}": array.astype(np.float32)
        for name, array in selector.items()
    }


def random_heads(rng: np.random.Generator, opts: PairOptions) -> dict[str, np.ndarray]:
    """A DSpark drafter's Markov head and, where it has one, confidence head."""
    heads = {
        "markov_head.markov_w1.weight": linear(rng, opts.vocab, opts.rank, 2.0),
        "markov_head.markov_w2.weight": linear(rng, opts.vocab, opts.rank, 8.0),
    }
    if opts.confidence:
        width = opts.hidden + opts.rank
        heads["confidence_head.proj.weight"] = linear(rng, 1, width)
        heads["confidence_head.proj.bias"] = linear(rng, 1, 1)[0]
    return heads


def random_convolution(
    rng: np.random.Generator, opts: PairOptions, strength: float
) -> dict[str, np.ndarray]:
    """Kernels at `strength` around the identity; 0 is the identity itself."""
    taps, size = opts.conv_kernel, opts.hidden
    base = 0.2 * strength * rng.standard_normal((2, taps, size))
    base[:, 0] += 1
    rows = 2 * taps * (size // opts.conv_group)
    return {
        "base_kernel": base.astype(np.float32),
        "kernel_projection.weight": linear(rng, rows, size, 0.2 * strength),
    }
