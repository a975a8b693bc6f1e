"""The fields of a drafter's config.json that take more than a look to read."""

from .config_reader import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"

ONLY = {  # settings the backbone has one form of
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1,
    "rope_parameters.partial_rotary_factor": 1,
    "rope_scaling.partial_rotary_factor": 1,
}


PARTS = (  # objects a config.json may hold
    *("dflash_config", "dspark_config", "rope_parameters", "rope_scaling"),
    "quantization",
)


def refuse_other_networks(read: ConfigReader) -> None:
    """Refuse a config that describes something this network does not compute."""
    for part in PARTS:
        if not isinstance(read.at(part), dict | None):
            raise read.fail(f"{part} is {read.at(part)!r}, expected an object")
    draft_vocab = read.at("draft_vocab_size")
    if draft_vocab not in (None, read.at("vocab_size")):
        raise read.fail(
            f"draft_vocab_size {draft_vocab} differs from vocab_size "
            f"{read.at('vocab_size')}; reduced vocabularies are not supported"
        )
    for place, supported in ONLY.items():
        if read.at(place) not in (None, supported):
            raise read.fail(
                f"{place} is {read.at(place)!r}; only {supported!r} is supported"
            )


def read_first_row(read: ConfigReader) -> int | None:
    """Which row predicts the first token, in the two ways configs say it."""
    places = {}
    for part in ("", "dflash_config.", "dspark_config."):
        start, anchor = f"{part}logits_start", f"{part}sample_from_anchor"
        if read.at(start) is not None:
            places[start] = read.integer(start, minimum=0)
        if read.flag(anchor) is not None:
            places[anchor] = 0 if read.flag(anchor) else 1
    if len(set(places.values())) > 1:
        said = ", ".join(f"{place} is {read.at(place)!r}" for place in places)
        raise read.fail(f"{said}; they contradict each other, keep the right one")
    row = next(iter(places.values()), None)
    if row not in (None, 0, 1):
        raise read.fail(f"{next(iter(places))} is {row}, expected 0 or 1")
    return row


ROPE_PARTS = ("rope_parameters", "rope_scaling")
UNSUPPORTED_YARN = ("mscale", "mscale_all_dim", "attention_factor")


def _in_rope_parts(name: str) -> list[str]:
    return [f"{part}.{name}" for part in ROPE_PARTS]


def read_rope_scaling(read: ConfigReader) -> dict | None:
    """yarn's parameters in one spelling; None for plain rotary positions."""
    place, kind = read.find(*_in_rope_parts("rope_type"), *_in_rope_parts("type"))
    if kind in (None, "default"):
        place, factor = read.find(*_in_rope_parts("factor"))
        if factor not in (None, 1):
            raise read.fail(f"{place} is {factor!r} without a rope_type that uses it")
        return None
    if kind != "yarn":
        raise read.fail(f"{place} is {kind!r}; only 'default' and 'yarn' are supported")
    for name in UNSUPPORTED_YARN:
        place, value = read.find(*_in_rope_parts(name))
        if value is not None:
            raise read.fail(f"{place} is {value!r}; yarn with it is not supported")
    if read.flag(*_in_rope_parts("truncate"), default=True) is False:
        raise read.fail("yarn with truncate false is not supported")
    original = _in_rope_parts("original_max_position_embeddings")
    found = {"factor": read.number(*_in_rope_parts("factor"), minimum=1.0)}
    found["original_max_position_embeddings"] = read.integer(*original)
    for name in ("beta_fast", "beta_slow"):  # with defaults in every implementation
        if read.find(*_in_rope_parts(name))[1] is not None:
            found[name] = read.number(*_in_rope_parts(name), minimum=0.0)
    return {"rope_type": "yarn"} | found


def read_longest(read: ConfigReader) -> int | None:
    """The longest context, where given."""
    if read.at("max_position_embeddings") is None:
        return None
    return read.integer("max_position_embeddings")


def read_layers(
    read: ConfigReader, layers: int, block: int
) -> tuple[tuple[str, ...], int | None]:
    """The type of every layer, and the window of the sliding ones."""
    types = read.at("layer_types")
    every_layer_slides = read.flag("dflash_config.use_swa")
    if types is None and every_layer_slides:
        types = [SLIDING] * layers
    elif types is None:
        if read.flag("use_sliding_window"):
            raise read.fail(
                "use_sliding_window is true but layer_types is missing; list the type "
                "of every layer"
            )
        types = [FULL] * layers
    if not isinstance(types, list) or len(types) != layers:
        raise read.fail(f"layer_types must list {layers} layers, found {types!r}")
    unknown = set(map(str, types)) - {FULL, SLIDING}
    if unknown:
        raise read.fail(
            f"layer_types has {sorted(unknown)}; known are {FULL} and {SLIDING}"
        )
    if every_layer_slides is not None and every_layer_slides != (SLIDING in types):
        raise read.fail(
            f"dflash_config.use_swa is {every_layer_slides} but layer_types is {types}"
        )
    if SLIDING not in types:
        return tuple(types), None
    window = read.integer("sliding_window", "dflash_config.swa_window_size")
    if window < block:
        raise read.fail(
            f"sliding_window {window} is smaller than block_size {block}; rows of one "
            "block would not see each other"
        )
    return tuple(types), window


def read_taps(read: ConfigReader) -> tuple[int, ...]:
    """The target layers whose outputs are read, 0-based."""
    place, taps = read.need(
        "dflash_config.target_layer_ids",
        "target_layer_ids",
        "dspark_target_layer_ids",
    )
    if (
        not isinstance(taps, list)
        or not taps
        or not all(isinstance(tap, int) and not isinstance(tap, bool) for tap in taps)
    ):
        raise read.fail(f"{place} is {taps!r}, expected a list of layers")
    return tuple(taps)


def read_depth(read: ConfigReader, taps: tuple[int, ...]) -> int:
    """The target's depth; `num_target_layers` may hold the number of taps instead.

    It does where it equals that number and a tap lies beyond it, or where the depth is
    given as well.
    """
    explicit = read.at("target_num_hidden_layers")
    places = ("dflash_config.num_target_layers", "num_target_layers")
    given = [place for place in places if read.at(place) is not None]
    depths = {place: read.integer(place) for place in given}
    if explicit is not None:
        depths = {"target_num_hidden_layers": read.integer("target_num_hidden_layers")}
        depths |= {p: read.at(p) for p in given if read.at(p) != len(taps)}
    else:
        depths = {
            place: depth
            for place, depth in depths.items()
            if depth != len(taps) or max(taps) < depth
        }
    if given and not depths:
        raise read.fail(
            f"{given[0]} {len(taps)} is the number of taps; the target's depth "
            "(target_num_hidden_layers) is missing"
        )
    return read.integer(*(depths or ["num_target_layers"]))


def read_causality(read: ConfigReader) -> bool | None:
    """Whether block rows see only rows before them; None where nothing says."""
    causal = read.flag(
        "is_causal",
        "dflash_config.is_causal",
        "dflash_config.causal",
        "dflash_query_causal",
    )
    free = read.flag("sliding_window_non_causal")
    if free is not None and causal is not None and causal == free:
        raise read.fail(
            f"sliding_window_non_causal is {free} but another field says causal is "
            f"{causal}; keep the right one"
        )
    return (not free) if causal is None and free is not None else causal


def read_quantization(read: ConfigReader) -> dict | None:
    """MLX's group size and bits; None for an unquantized drafter."""
    found = read.at("quantization")
    if found is None:
        if read.at("quantization_config") is not None:
            raise read.fail(
                "quantization_config without MLX's quantization: this format is not "
                "supported, use the unquantized drafter"
            )
        return None
    bits = read.integer("quantization.bits")
    group = read.integer("quantization.group_size")
    if read.at("quantization.mode") not in (None, "affine"):
        raise read.fail("quantization.mode must be affine")
    return {"group_size": group, "bits": bits}
