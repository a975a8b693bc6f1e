"""The target through transformers: a forward that also returns tapped layers."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from mlx_dflash2.checkpoint import Source

# transformers renamed the argument
_CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


class Target:
    """A frozen llama model. It keeps no sequence: a cache is passed to each forward.

    Attributes:
        model: The transformers model, in evaluation mode, its weights frozen.
        source: Where it was loaded from, if it was.
        eos_token_ids: The tokens that end a sequence, as its files say.
    """

    def __init__(self, model: LlamaForCausalLM, source: Source | None = None):
        self.model, self.source = model.eval().requires_grad_(False), source
        self.eos_token_ids = frozenset(
            _as_list(model.generation_config.eos_token_id)
            or _as_list(model.config.eos_token_id)
        )

    @property
    def hidden_size(self) -> int:
        return self.model.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.model.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings (..., D) of token ids (...)."""
        return self.model.get_input_embeddings()(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of rows (..., D), in the head's dtype."""
        head = self.model.get_output_embeddings()
        return head(hidden.to(head.weight.dtype))

    def make_cache(self) -> DynamicCache:
        """An empty key/value cache, for one sequence or batch."""
        return DynamicCache(config=self.model.config)

    def forward(
        self,
        tokens: Tensor,
        cache: DynamicCache | None = None,
        *,
        taps: Sequence[int] = (),
        logits_to_keep: int = 0,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model.

        Args:
            tokens: Shape: (B, S).
            cache: Extended in place; None runs without one.
            taps: Layers whose output to return, 0-based; the last layer's is not to
                be had before the final norm, so it may not be tapped.
            logits_to_keep: Compute logits for this many last rows only; 0 for all.
            mask: 0 where padding is, cached columns included. Shape: (B, C+S).
            positions: Of the tokens, where a mask shifts them. Shape: (B, S).

        Returns:
            Logits (B, S, V), and the tapped outputs joined in the given order on the
            last axis, (B, S, T*D); None without taps.
        """
        output = self.model(
            tokens,
            attention_mask=mask,
            position_ids=positions,
            **{_CACHE: cache},
            use_cache=cache is not None,
            output_hidden_states=bool(taps),
            logits_to_keep=logits_to_keep,
        )
        if not taps:
            return output.logits, None
        self._check_taps(taps)
        states = output.hidden_states  # states[0] is the embedding
        return output.logits, torch.cat([states[tap + 1] for tap in taps], dim=-1)

    def trunk(
        self,
        tokens: Tensor,
        *,
        taps: Sequence[int],
        positions: Tensor,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the layers without the head, keeping no state but the tapped ones.

        Args:
            tokens: Shape: (B, S).
            taps: As `forward` takes them.
            positions: Shape: (B, S).
            mask: True where visible, (B, 1, S, S); None sees everything before.

        Returns:
            The tapped outputs, (B, S, T*D), and the rows after the final norm, which
            `head` makes logits of, (B, S, D).
        """
        self._check_taps(taps)
        body = self.model.model
        hidden = body.embed_tokens(tokens)
        rotations = body.rotary_emb(hidden, position_ids=positions)
        tapped = {}
        for index, layer in enumerate(body.layers):
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotations)
            if index in taps:
                tapped[index] = hidden
        features = torch.cat([tapped[tap] for tap in taps], dim=-1)
        return features, body.norm(hidden)

    def _check_taps(self, taps: Sequence[int]) -> None:
        if not all(0 <= tap < self.num_layers - 1 for tap in taps):
            raise ValueError(f"taps {list(taps)} of {self.num_layers} layers")

    def roll_back(self, cache: DynamicCache, length: int) -> None:
        """Cut the cache to its first `length` positions."""
        excess = cache.get_seq_length() - length
        if excess < 0:
            raise ValueError(f"the cache is {-excess} positions short of {length}")
        if excess:
            cache.crop(-excess)  # a positive count means other things by version


def _as_list(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
