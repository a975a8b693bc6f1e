"""The tensors of a drafter: their published names and shapes."""

from collections.abc import Iterable, Mapping

from .config import DrafterConfig, Shapes
from .errors import DFlash2Error

SPELLINGS = {  # met in the wild -> published; names not listed are published ones
    "candidate_selector.predecessor_codebook.weight": (
        "candidate_selector.predecessor_codebook"
    ),
    "candidate_selector.successor_codebook.weight": (
        "candidate_selector.successor_codebook"
    ),
    "context_proj.weight": "fc.weight",
    "context_norm.weight": "hidden_norm.weight",
    "final_norm.weight": "norm.weight",
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}

REDUCED = ("d2t", "t2d")  # tables between a drafter's vocabulary and the target's
BORROWED = ("embed_tokens.weight", "lm_head.weight")  # the target's, unless stored


def published_names(names: Iterable[str], *, where: str) -> dict[str, str]:
    """Map each stored name to its published spelling; rotary buffers are left out.

    Raises:
        DFlash2Error: Two stored names mean the same tensor.
    """
    mapping: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in names:
        if "rotary_emb." in name:
            continue
        bare = name.removeprefix("model.")
        published = SPELLINGS.get(bare, bare)
        for part in ("scales", "biases"):  # a quantized spelling keeps its suffix
            stem = bare.removesuffix(f".{part}")
            if stem != bare and f"{stem}.weight" in SPELLINGS:
                base = SPELLINGS[f"{stem}.weight"].removesuffix(".weight")
                published = f"{base}.{part}"
        if published in owner:
            raise DFlash2Error(
                f"{where}: {owner[published]} and {name} are two spellings of one "
                "tensor; keep the right one"
            )
        owner[published] = name
        mapping[name] = published
    return mapping


def quantizable(name: str) -> bool:
    """Whether the module of this name may hold quantized weights.

    Only the backbone's linear layers: selector, convolutions and norms decide which
    token is drafted and are small.
    """
    parts = name.removesuffix(".weight").split(".")
    return parts[-1] in {
        *("fc", "q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }


def expected_shapes(config: DrafterConfig) -> Shapes:
    """Every tensor an unquantized drafter of this config must have, with its shape."""
    size, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    pairs, inner = (
        config.num_key_value_heads * config.head_dim,
        config.intermediate_size,
    )
    shapes = {
        "fc.weight": (size, len(config.target_layer_ids) * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    } | config.own_tensors()
    layer = {
        "input_layernorm.weight": (size,),
        "post_attention_layernorm.weight": (size,),
        "self_attn.q_proj.weight": (heads, size),
        "self_attn.k_proj.weight": (pairs, size),
        "self_attn.v_proj.weight": (pairs, size),
        "self_attn.o_proj.weight": (size, heads),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "mlp.gate_proj.weight": (inner, size),
        "mlp.up_proj.weight": (inner, size),
        "mlp.down_proj.weight": (size, inner),
    }
    layer |= config.own_layer_tensors()
    for index in range(config.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_tensors(
    found: Mapping[str, tuple[int, ...]], config: DrafterConfig, *, where: str
) -> None:
    """Hold a file's tensors (published names and shapes) against the config.

    Raises:
        DFlash2Error: A tensor is missing, unknown or of another shape.
    """
    for name in REDUCED:
        if name in found:
            raise DFlash2Error(
                f"{where}: holds {name}, the table of a reduced vocabulary; reduced "
                "vocabularies are not supported"
            )
    expected = expected_shapes(config)
    optional = dict.fromkeys(BORROWED, (config.vocab_size, config.hidden_size))
    optional = {name: optional[name] for name in BORROWED if name in found}
    for name in [name for name in expected if quantizable(name)]:
        scales = name.removesuffix("weight") + "scales"
        if scales in found:
            expected |= _quantized(name, expected[name], config, where)
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys() - optional.keys())
    if missing or unknown:
        raise DFlash2Error(
            f"{where}: not a {config.title} drafter: {_list(missing, unknown)}"
        )
    for name, shape in (expected | optional).items():
        if tuple(found[name]) != shape:
            raise DFlash2Error(
                f"{where}: {name} has shape {list(found[name])}, but config.json asks "
                f"for {list(shape)}"
            )


def _quantized(
    name: str, shape: tuple[int, ...], config: DrafterConfig, where: str
) -> dict[str, tuple[int, ...]]:
    if config.quantization is None:
        raise DFlash2Error(
            f"{where}: {name} is quantized, but config.json has no quantization"
        )
    rows, columns = shape
    groups = (rows, columns // config.quantization["group_size"])
    stem = name.removesuffix("weight")
    return {
        name: (rows, columns * config.quantization["bits"] // 32),
        f"{stem}scales": groups,
        f"{stem}biases": groups,
    }


def _list(missing: list[str], unknown: list[str]) -> str:
    def some(names: list[str]) -> str:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return ", ".join(names[:4]) + more

    parts = [f"missing {some(missing)}"] if missing else []
    parts += [f"unknown {some(unknown)}"] if unknown else []
    return "; ".join(parts)
