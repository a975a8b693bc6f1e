"""The DFlash 2 drafter: fuse features, run a block, propose tokens."""

import mlx.core as mx
import mlx.nn as nn

from .attention import Attention, LayerContext, block_mask
from .checkpoint import Source
from .config import DrafterConfig
from .conv import DynamicConv
from .selector import CandidateSelector, Proposal, top_candidates
from .target import Target

Context = list[LayerContext]  # one per drafter layer


class MLP(nn.Module):
    """Gated feed-forward with SiLU."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def __call__(self, rows: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(rows)) * self.up_proj(rows))


class DrafterLayer(nn.Module):
    """Pre-norm attention and feed-forward, each between the sides of a convolution."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        conv = (size, config.conv_group_size, config.conv_kernel_size)
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.attention_conv = DynamicConv(*conv)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp_conv = DynamicConv(*conv)
        self.mlp = MLP(config)

    def __call__(
        self, rows: mx.array, context: LayerContext, mask: mx.array | str | None
    ) -> mx.array:
        """Shape of `rows` and of the result: (B, L, D)."""
        inner, kernels = self.attention_conv.prepare(self.input_layernorm(rows))
        inner = self.self_attn(inner, context, mask)
        rows = rows + self.attention_conv.finish(inner, kernels)
        inner, kernels = self.mlp_conv.prepare(self.post_attention_layernorm(rows))
        return rows + self.mlp_conv.finish(self.mlp(inner), kernels)


class DFlash2Drafter(nn.Module):
    """Drafts `block_size - 1` tokens after an anchor in one pass.

    Embedding and head are the target's and are handed in, unless the drafter's file
    holds its own. State lives in the context that `make_context` returns.

    Attributes:
        source: Where it was loaded from, if it was.
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        own_embedding: bool = False,
        own_head: bool = False,
        source: Source | None = None,
    ):
        super().__init__()
        size, taps = config.hidden_size, len(config.target_layer_ids)
        self.config, self.source = config, source
        self.fc = nn.Linear(taps * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.layers = [DrafterLayer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.candidate_selector = CandidateSelector(config)
        if own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        if own_head:
            self.lm_head = nn.Linear(size, config.vocab_size, bias=False)

    @property
    def dtype(self) -> mx.Dtype:
        return self.hidden_norm.weight.dtype

    def make_context(self) -> Context:
        """An empty context for one generation."""
        windows = map(self.config.layer_window, range(self.config.num_hidden_layers))
        return [LayerContext(window) for window in windows]

    def extend(self, features: mx.array, context: Context) -> None:
        """Append committed positions to the context.

        Args:
            features: The target's tapped states. Shape: (1, S, T*D).
        """
        fused = self.hidden_norm(self.fc(features.astype(self.dtype)))
        for layer, held in zip(self.layers, context, strict=True):
            held.append(*layer.self_attn.keys_values(fused, held.end))

    def hidden(self, block: mx.array, context: Context) -> mx.array:
        """Final hidden rows of a block that starts where the context ends.

        Args:
            block: Embedded rows. Shape: (1, L, D).

        Returns:
            Rows after the final norm. Shape: (1, L, D).
        """
        rows, length = block.astype(self.dtype), block.shape[1]
        masks: dict[tuple, mx.array | str | None] = {}
        for index, (layer, held) in enumerate(zip(self.layers, context, strict=True)):
            held.make_room(length)
            sight = self.config.layer_window(index), self.config.layer_is_causal(index)
            if sight not in masks:
                masks[sight] = block_mask(held.rows, length, *sight)
            rows = layer(rows, held, masks[sight])
        return self.norm(rows)

    def propose(
        self,
        anchor: int,
        target: Target,
        context: Context,
        *,
        count: int | None = None,
        temperature: float = 0.0,
        key: mx.array | None = None,
    ) -> Proposal:
        """Draft the tokens after `anchor`.

        The block always has its trained width; `count` only limits how many of its
        tokens are proposed.

        Args:
            target: Whose embedding and head are used.
            count: Tokens to propose, at most `config.num_draft_tokens`.
            temperature: 0 is greedy; above, tokens are drawn and q is returned.
            key: Random key for the draws.
        """
        config = self.config
        count = config.num_draft_tokens if count is None else count
        ids = mx.array([[anchor] + [config.mask_token_id] * config.num_draft_tokens])
        embed = self.embed_tokens if "embed_tokens" in self else target.embed
        block = embed(ids).astype(self.dtype) * config.input_embedding_scale
        hidden = self.hidden(block, context)[0, 1 : count + 1]
        candidates, logits = top_candidates(
            self._head(hidden, target), config.selector_top_k
        )
        return self.candidate_selector.propose(
            hidden,
            ids[0, :1],
            candidates,
            self._transform(logits),
            temperature=temperature,
            key=key,
        )

    def _head(self, hidden: mx.array, target: Target) -> mx.array:
        return self.lm_head(hidden) if "lm_head" in self else target.head(hidden)

    def _transform(self, logits: mx.array) -> mx.array:
        """Output multiplier, then softcap, on float32 logits."""
        logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return cap * mx.tanh(logits / cap) if cap else logits
