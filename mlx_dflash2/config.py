"""A drafter's config.json, read from every place its fields are published in."""

import importlib
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

from .config_fields import (
    SLIDING,
    read_causality,
    read_depth,
    read_first_row,
    read_layers,
    read_longest,
    read_quantization,
    read_rope_scaling,
    read_taps,
    refuse_other_networks,
)
from .config_reader import ConfigReader
from .errors import DFlash2Error

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
    first_row_varies: ClassVar[bool] = True  # a config may name the other one
    sliding_is_causal: ClassVar[bool] = True  # where is_causal is not given
    draft_sampling: ClassVar[str] = "sample"  # the faster way to draft at T > 0
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
        refuse_other_networks(read)
        size = read.integer("hidden_size")
        heads = read.integer("num_attention_heads")
        block = read.integer(
            "dflash_config.block_size", "block_size", "dspark_block_size", minimum=1
        )
        layers = read.integer("num_hidden_layers")
        layer_types, window = read_layers(read, layers, block)
        taps = read_taps(read)
        first_row = read_first_row(read)
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
            rope_scaling=read_rope_scaling(read),
            max_position_embeddings=read_longest(read),
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
            num_target_layers=read_depth(read, taps),
            layer_types=layer_types,
            sliding_window=window,
            is_causal=read_causality(read),
            output_multiplier=read.nested_number("output_multiplier", default=1.0),
            final_logit_softcapping=read.nested_number(
                "final_logit_softcapping", default=0.0
            ),
            input_embedding_scale=read.nested_number(
                "input_embedding_scale", default=1.0
            ),
            quantization=read_quantization(read),
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


class Sizes(Protocol):
    """What a target of either backend says of its shape."""

    hidden_size: int
    num_layers: int
    vocab_size: int


def check_fit(config: DrafterConfig, target: Sizes, *, where: str, name: str) -> None:
    """Hold a drafter's config against a loaded target.

    Args:
        where, name: What a message calls the drafter's config, and the target.

    Raises:
        DFlash2Error: The drafter was made for a target of another shape.
    """
    for size, found in (
        ("hidden_size", target.hidden_size),
        ("num_target_layers", target.num_layers),
        ("vocab_size", target.vocab_size),
    ):
        wanted = getattr(config, size)
        if wanted != found:
            raise DFlash2Error(
                f"{where}: {size} is {wanted}, but the target's is {found} ({name}); "
                "use the drafter trained for this target"
            )
