"""The target: an mlx-lm llama model whose layer outputs can be read."""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.llama import Model

from .checkpoint import Source
from .errors import DFlash2Error

Cache = list  # mlx-lm's cache objects, one per layer


class Target:
    """A loaded target.

    Attributes:
        model: The mlx-lm model; never changed.
        config: Its config.json as loaded.
        source: Where it came from.
    """

    def __init__(self, model: Model, config: dict, source: Source):
        self.model, self.config, self.source = model, config, source
        kinds = {type(cache).__name__ for cache in self.make_cache()}
        if kinds != {KVCache.__name__}:
            raise DFlash2Error(
                f"{source.name}: its cache ({', '.join(sorted(kinds))}) cannot be "
                "rolled back after a rejected draft; use a target with full attention "
                "in every layer"
            )

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    @property
    def hidden_size(self) -> int:
        return self.model.args.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.model.args.vocab_size

    @property
    def dtype(self) -> mx.Dtype:
        """What the target computes in, also when its weights are quantized."""
        return self.model.model.norm.weight.dtype

    @property
    def rope_theta(self) -> float:
        """The base of its rotary positions."""
        return float(self.model.args.rope_theta)

    def make_cache(self) -> Cache:
        return make_prompt_cache(self.model)

    def embed(self, tokens: mx.array) -> mx.array:
        """Shape: (B, L) to (B, L, D)."""
        return self.model.model.embed_tokens(tokens)

    def head(self, hidden: mx.array) -> mx.array:
        """Logits of final hidden rows. Shape: (..., D) to (..., V)."""
        hidden = hidden.astype(self.dtype)
        if "lm_head" in self.model:
            return self.model.lm_head(hidden)
        return self.model.model.embed_tokens.as_linear(hidden)

    def forward(
        self, tokens: mx.array, cache: Cache, taps: Sequence[int] = ()
    ) -> tuple[mx.array, mx.array | None]:
        """Run tokens through the layers, appending to `cache`.

        The same operations in the same order as mlx-lm's own forward.

        Args:
            tokens: Shape: (B, L).
            cache: From `make_cache`.
            taps: Layers whose outputs to return, 0-based.

        Returns:
            Final hidden rows after the norm, shape (B, L, D), and the tapped outputs
            joined in the order of `taps`, shape (B, L, T*D), None without taps.
        """
        body = self.model.model
        hidden = body.embed_tokens(tokens)
        mask = create_attention_mask(hidden, cache[0])
        tapped = {}
        for index, (layer, held) in enumerate(zip(body.layers, cache, strict=True)):
            hidden = layer(hidden, mask, cache=held)
            if index in taps:
                tapped[index] = hidden
        features = mx.concatenate([tapped[tap] for tap in taps], -1) if taps else None
        return body.norm(hidden), features

    @staticmethod
    def roll_back(cache: Cache, length: int) -> None:
        """Cut every layer of the cache to its first `length` positions."""
        for held in cache:
            held.trim(held.offset - length)
