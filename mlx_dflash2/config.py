"""A drafter's config.json, read from every place its fields are published in."""

import importlib
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from .errors import DFlash2Error

FULL, SLIDING = "full_attention", "sliding_attention"
CODE_KEYS = ("auto_map", "model_file")  # name Python files to run; never followed
LARGEST = 3.4e38  # of float32
LARGEST_BLOCK = 256  # rows; far above any trained block, far below what memory bears
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """What decides what a drafter computes; each family adds its own fields.

    Spelled as in config.json. `block_size` counts the rows of a block, the anchor's
    included, and `first_row` is the row that predicts the token after the anchor: 1
    where a row predicts its own position, 0 where it predicts the next one.
    `target_layer_ids` are 0-based and name the *output* of a layer. `is_causal` is
    None where the config does not say.

    Attributes:
        explicit_first_row: The config says which row is first; else the family does.
        rope_scaling: yarn's parameters; None for plain rotary positions.
        read_from: The dotted places of config.json the fields were found in.
    """

    kind: ClassVar[str]  # the family's name on the command line
    title: ClassVar[str]
    architecture: ClassVar[str]  # what a published config.json calls it
    network_class: ClassVar[str]  # in the module named `kind`, of either backend
    places: ClassVar[dict[str, str]]  # where a published config.json has a field
    default_first_row: ClassVar[int] = 1
    sliding_is_causal: ClassVar[bool] = True  # where is_causal is not given
    draft_sampling: ClassVar[str] = "sample"  # the faster way to draft at T > 0
    only: ClassVar[dict[str, Any]] = {}  # settings the family has one form of
    own_settings: ClassVar[tuple[str, ...]] = ()  # config.json fields no other has

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_interleaved: bool
    rope_scaling: dict | None = None
    max_position_embeddings: int | None = None
    block_size: int
    first_row: int
    explicit_first_row: bool = True
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    input_embedding_scale: float = 1.0
    quantization: dict | None = None
    read_from: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def from_dict(cls, raw: dict, *, where: str = "config.json") -> Self:
        """Build from the parsed config.json; `where` names it in errors.

        Raises:
            DFlash2Error: A field is missing, contradictory or not supported.
        """
        read = ConfigReader(raw, where)
        _refuse_other_networks(read, cls.only)
        size = read.integer("hidden_size")
        heads = read.integer("num_attention_heads")
        block = read.integer(
            "dflash_config.block_size", "block_size", "dspark_block_size", minimum=1
        )
        layers = read.integer("num_hidden_layers")
        layer_types, window = _read_layers(read, layers, block)
        taps = _read_taps(read)
        first_row = _read_first_row(read)
        config = cls(
            hidden_size=size,
            num_hidden_layers=layers,
            intermediate_size=read.integer("intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=read.integer("num_key_value_heads"),
            head_dim=read.integer("head_dim", default=size // heads),
            vocab_size=read.integer("vocab_size"),
            rms_norm_eps=read.number("rms_norm_eps", minimum=0.0),
            rope_theta=read.number(
                "rope_theta",
                "rope_parameters.rope_theta",
                "rope_scaling.rope_theta",
                minimum=1.0,
            ),
            rope_interleaved=not read.flag(
                "is_neox_style", "rope_is_neox_style", default=True
            ),
            rope_scaling=_read_rope_scaling(read),
            max_position_embeddings=_read_longest(read),
            block_size=block,
            first_row=cls.default_first_row if first_row is None else first_row,
            explicit_first_row=first_row is not None,
            mask_token_id=read.integer(
                "dflash_config.mask_token_id",
                "mask_token_id",
                "dspark_noise_token_id",
                minimum=0,
            ),
            target_layer_ids=taps,
            num_target_layers=_read_depth(read, taps),
            layer_types=layer_types,
            sliding_window=window,
            is_causal=_read_causality(read),
            output_multiplier=read.nested_number("output_multiplier", default=1.0),
            final_logit_softcapping=read.nested_number(
                "final_logit_softcapping", default=0.0
            ),
            input_embedding_scale=read.nested_number(
                "input_embedding_scale", default=1.0
            ),
            quantization=_read_quantization(read),
            **cls.own_fields(read),
        )
        config.check(where)
        return replace(config, read_from=tuple(read.found))

    @classmethod
    def network(cls, package: str) -> type:
        """The family's network in a backend's package."""
        module = importlib.import_module(f"{package}.{cls.kind}")
        return getattr(module, cls.network_class)

    @classmethod
    def own_fields(cls, read: "ConfigReader") -> dict[str, Any]:
        """The fields only this family has."""
        return {}

    def own_tensors(self) -> Shapes:
        """Shapes of the tensors only this family has, outside the layers."""
        return {}

    def own_layer_tensors(self) -> Shapes:
        """Shapes of the tensors only this family has, in every layer."""
        return {}

    @classmethod
    def owns(cls, tensor: str) -> bool:
        """Whether a published tensor name is only found in this family."""
        return False

    @classmethod
    def claims(cls, architecture: str) -> bool:
        """Whether an entry of `architectures` names this family."""
        return False

    @property
    def num_draft_tokens(self) -> int:
        """Tokens one block drafts: one for every row from `first_row` on."""
        return self.block_size - self.first_row

    def layer_is_causal(self, layer: int) -> bool:
        """Whether a block row of `layer` sees only the block rows up to itself."""
        if self.is_causal is not None:
            return self.is_causal
        return self.sliding_is_causal and self.layer_types[layer] == SLIDING

    def layer_window(self, layer: int) -> int | None:
        """Keys at this distance or further are unseen; None sees everything."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def check(self, where: str) -> None:
        """Raise DFlash2Error where fields do not fit each other."""

        def demand(holds: bool, message: str) -> None:
            if not holds:
                raise DFlash2Error(f"{where}: {message}")

        demand(
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"num_attention_heads is {self.num_attention_heads}, not a multiple of "
            f"num_key_value_heads {self.num_key_value_heads}",
        )
        demand(
            self.num_draft_tokens > 0,
            f"block_size {self.block_size} drafts nothing when row {self.first_row} is "
            "the first that predicts",
        )
        demand(
            self.head_dim % 2 == 0,
            f"head_dim is {self.head_dim}, but rotary positions turn pairs; it must be "
            "even",
        )
        demand(
            self.block_size <= LARGEST_BLOCK,
            f"block_size is {self.block_size}, expected at most {LARGEST_BLOCK}",
        )
        demand(self.rms_norm_eps > 0, "rms_norm_eps is 0, expected a number above 0")
        demand(
            self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} is outside the vocabulary of "
            f"{self.vocab_size}",
        )
        demand(self.output_multiplier > 0, "output_multiplier must be above 0")
        demand(
            self.final_logit_softcapping >= 0,
            "final_logit_softcapping must not be negative",
        )
        last = self.num_target_layers - 1
        for tap in self.target_layer_ids:
            demand(
                0 <= tap < last,
                f"target_layer_ids has {tap}, but with num_target_layers "
                f"{self.num_target_layers} it must be 0 to {last - 1}"
                + (
                    "; for the last layer it is not settled whether the tap comes "
                    "before or after the final norm"
                    if tap == last
                    else ""
                ),
            )


def check_fit(
    config: DrafterConfig,
    *,
    hidden_size: int,
    num_layers: int,
    vocab_size: int,
    where: str,
    target: str,
) -> None:
    """Hold a drafter's config against a loaded target.

    Raises:
        DFlash2Error: The drafter was made for a target of another shape.
    """
    for name, found in (
        ("hidden_size", hidden_size),
        ("num_target_layers", num_layers),
        ("vocab_size", vocab_size),
    ):
        wanted = getattr(config, name)
        if wanted != found:
            raise DFlash2Error(
                f"{where}: {name} is {wanted}, but the target's is {found} ({target}); "
                "use the drafter trained for this target"
            )


def read_json(path: Path) -> dict:
    """Read a JSON object.

    Raises:
        DFlash2Error: The file is missing, unreadable or not a JSON object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DFlash2Error(f"{path}: no such file; is this a model folder?") from None
    except OSError as error:
        raise DFlash2Error(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DFlash2Error(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise DFlash2Error(
            f"{path}: expected a JSON object, found {type(raw).__name__}"
        )
    return raw


class ConfigReader:
    """Looks a field up in several places and refuses places that disagree."""

    def __init__(self, raw: dict, where: str):
        self.raw, self.where = raw, where
        self.found: dict[str, None] = {}  # places that held a value, in order

    def fail(self, message: str) -> DFlash2Error:
        return DFlash2Error(f"{self.where}: {message}")

    def at(self, place: str):
        """The value at a dotted place; None where absent or null."""
        value = self.raw
        for key in place.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def find(self, *places: str) -> tuple[str, Any]:
        """The one value found and its place; None and the first place without one."""
        found = [(p, v) for p in places if (v := self.at(p)) is not None]
        self.found |= dict.fromkeys(place for place, _ in found)
        for place, value in found[1:]:
            first, known = found[0]
            if value != known:
                raise self.fail(
                    f"{first} is {known!r} but {place} is {value!r}; they name one "
                    "setting, keep the right one"
                )
        return found[0] if found else (places[0], None)

    def need(self, *places: str, default: Any = None) -> tuple[str, Any]:
        place, value = self.find(*places)
        if value is None:
            value = default
        if value is None:
            raise self.fail(
                f"{' or '.join(places)} is missing; it changes the result, so it has "
                "no default"
            )
        return place, value

    def integer(
        self, *places: str, minimum: int = 1, default: int | None = None
    ) -> int:
        place, value = self.need(*places, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(
                f"{place} is {value!r}, expected a whole number of at least {minimum}"
            )
        return value

    def number(
        self, *places: str, default: float | None = None, minimum: float = -math.inf
    ) -> float:
        place, value = self.need(*places, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(f"{place} is {value!r}, expected a number")
        if not abs(value) <= LARGEST or value < minimum:
            least = f" of at least {minimum:g}" if math.isfinite(minimum) else ""
            raise self.fail(f"{place} is {value!r}, expected a finite number{least}")
        return float(value)

    def flag(self, *places: str, default: bool | None = None) -> bool | None:
        place, value = self.find(*places)
        if value is not None and not isinstance(value, bool):
            raise self.fail(f"{place} is {value!r}, expected true or false")
        return default if value is None else value

    def nested_integer(self, name: str) -> int:
        return self.integer(f"dflash_config.{name}", name)

    def nested_number(self, name: str, *, default: float) -> float:
        return self.number(f"dflash_config.{name}", name, default=default)


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


def _refuse_other_networks(read: ConfigReader, only: dict[str, Any]) -> None:
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
    for place, supported in (ONLY | only).items():
        if read.at(place) not in (None, supported):
            raise read.fail(
                f"{place} is {read.at(place)!r}; only {supported!r} is supported"
            )


def _read_first_row(read: ConfigReader) -> int | None:
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


def _read_rope_scaling(read: ConfigReader) -> dict | None:
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


def _read_longest(read: ConfigReader) -> int | None:
    if read.at("max_position_embeddings") is None:
        return None
    return read.integer("max_position_embeddings")


def _read_layers(
    read: ConfigReader, layers: int, block: int
) -> tuple[tuple[str, ...], int | None]:
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


def _read_taps(read: ConfigReader) -> tuple[int, ...]:
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


def _read_depth(read: ConfigReader, taps: tuple[int, ...]) -> int:
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


def _read_causality(read: ConfigReader) -> bool | None:
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


def _read_quantization(read: ConfigReader) -> dict | None:
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
