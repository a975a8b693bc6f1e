"""What all drafter families share: fuse features, keep a context, run a block."""

import abc
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from .attention import Attention, LayerContext, block_mask
from .checkpoint import Source
from .config import DrafterConfig
from .target import Target

Context = list[LayerContext]  # one per drafter layer


@dataclass(frozen=True)
class Proposal:
    """Drafted tokens and, when they were sampled, the distribution they came from.

    Attributes:
        tokens: Shape (g,), int32.
        candidates: Token ids q is spread over, distinct in a slot. Shape: (g, K). None
            where q covers the whole vocabulary.
        probabilities: q given the tokens before, float32, zero elsewhere. Shape:
            (g, K), or (g, V) without candidates. None for a greedy proposal.
    """

    tokens: mx.array
    candidates: mx.array | None = None
    probabilities: mx.array | None = None

    def as_certain(self) -> "Proposal":
        """The same tokens, drawn from a distribution that allows nothing else."""
        tokens = self.tokens[:, None]
        ones = mx.ones(tokens.shape, mx.float32)
        return replace(self, candidates=tokens, probabilities=ones)


@dataclass(frozen=True)
class Draws:
    """How a proposal is chosen.

    Attributes:
        temperature: 0 is greedy; above, tokens are drawn and q is returned.
        key: Random key, needed for draws.
        confidence_threshold: Cut before the first slot less sure than this; 0 never.
    """

    temperature: float = 0.0
    key: mx.array | None = None
    confidence_threshold: float = 0.0


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
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = MLP(config)

    def __call__(
        self, rows: mx.array, context: LayerContext, mask: mx.array | str | None
    ) -> mx.array:
        """Shape of `rows` and of the result: (B, L, D)."""
        rows = rows + self.self_attn(self.input_layernorm(rows), context, mask)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class Drafter(nn.Module):
    """Drafts `config.num_draft_tokens` tokens after an anchor in one pass.

    A family subclasses it, chooses its layers and decides tokens from rows. Embedding
    and head are the target's and are handed in, unless the drafter's file holds its
    own. State lives in the context that `make_context` returns.

    Attributes:
        source: Where it was loaded from, if it was.
    """

    layer_class: type[nn.Module] = DrafterLayer

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
        self.layers = [
            self.layer_class(config) for _ in range(config.num_hidden_layers)
        ]
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
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
        confidence_threshold: float = 0.0,
    ) -> Proposal:
        """Draft the tokens after `anchor`.

        The block always has its trained width; `count` only limits how many of its
        tokens are proposed.

        Args:
            target: Whose embedding and head are used.
            count: Tokens to propose, at most `config.num_draft_tokens`.
            temperature: 0 is greedy; above, tokens are drawn and q is returned.
            key: Random key for the draws.
            confidence_threshold: Propose no slot less sure than this, and none after;
                for drafters with a confidence head.
        """
        config = self.config
        count = config.num_draft_tokens if count is None else count
        masks = [config.mask_token_id] * (config.block_size - 1)
        ids = mx.array([[anchor, *masks]])
        embed = self.embed_tokens if "embed_tokens" in self else target.embed
        block = embed(ids).astype(self.dtype) * config.input_embedding_scale
        first = config.first_row
        hidden = self.hidden(block, context)[0, first : first + count]
        head = self.lm_head if "lm_head" in self else target.head
        draws = Draws(temperature, key, confidence_threshold)
        return self.decide(hidden, head(hidden), ids[0, :1], draws)

    @abc.abstractmethod
    def decide(
        self, hidden: mx.array, logits: mx.array, anchor: mx.array, draws: Draws
    ) -> Proposal:
        """Choose one token for every slot; each family has its own way.

        Args:
            hidden: Post-norm rows of the slots. Shape: (g, D).
            logits: The head's, not yet transformed. Shape: (g, V).
            anchor: Shape: (1,).
            draws: Greedy, or how to sample.
        """

    def transform(self, logits: mx.array) -> mx.array:
        """Output multiplier, then softcap, in float32."""
        logits = logits.astype(mx.float32) * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return cap * mx.tanh(logits / cap) if cap else logits
