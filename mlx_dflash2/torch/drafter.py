"""What all drafter families share: fuse features, run the layers over a block."""

import abc
from typing import Protocol

import torch
from torch import Tensor, nn

from mlx_dflash2.checkpoint import Source
from mlx_dflash2.config import DrafterConfig

from .attention import RMSNorm, visible
from .layers import DrafterLayer
from .proposal import Draws, Proposal


class Vocabulary(Protocol):
    """What a drafter borrows from its target."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings (..., D) of token ids (...)."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden rows (..., D), which it casts to its dtype."""


class DrafterContext:
    """Keys and values of the committed positions, per layer, oldest first.

    Block rows never enter it. A sliding layer keeps the rows its window can reach.

    Attributes:
        length: Committed positions so far, rows a window dropped included; the
            position of the next anchor.
    """

    def __init__(self, drafter: "Drafter"):
        config = drafter.config
        weight = drafter.fc.weight
        empty = weight.new_empty(1, config.num_key_value_heads, 0, config.head_dim)
        self.length = 0
        self._layers = [(empty, empty)] * config.num_hidden_layers
        self._windows = [
            config.layer_window(layer) for layer in range(config.num_hidden_layers)
        ]

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each (1, H, S, head_dim)."""
        return self._layers[layer]

    def positions(self, layer: int) -> Tensor:
        """Absolute positions of the rows one layer holds. Shape: (S,)."""
        keys = self._layers[layer][0]
        return torch.arange(
            self.length - keys.shape[2], self.length, device=keys.device
        )

    def append(self, rows: list[tuple[Tensor, Tensor]]) -> None:
        """Add new keys and values, one pair per layer, each (1, H, S, head_dim)."""
        for layer, (window, new) in enumerate(zip(self._windows, rows, strict=True)):
            joined = [
                torch.cat(pair, dim=2)
                for pair in zip(self._layers[layer], new, strict=True)
            ]
            if window is not None:
                excess = max(0, joined[0].shape[2] - (window - 1))
                joined = [part[:, :, excess:] for part in joined]
            self._layers[layer] = tuple(joined)
        self.length += rows[0][0].shape[2]


class Drafter(nn.Module):
    """The backbone under its published parameter names.

    A family subclasses it, chooses its layers and decides tokens from rows. Embedding
    and head are the target's and passed in where they are needed, unless
    the checkpoint brings its own.

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
        self.config, self.source = config, source
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(
            self.layer_class(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(size, eps)
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, size) if own_embedding else None
        )
        self.lm_head = (
            nn.Linear(size, config.vocab_size, bias=False) if own_head else None
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def make_context(self) -> DrafterContext:
        """An empty context, for one sequence."""
        return DrafterContext(self)

    def fuse(self, features: Tensor) -> Tensor:
        """Context features (B, S, T*D) to the rows every layer reads, (B, S, D)."""
        return self.hidden_norm(self.fc(features.to(self.dtype)))

    def extend(self, features: Tensor, context: DrafterContext) -> None:
        """Append the features of newly committed tokens to the context.

        Args:
            features: Taps joined in the order of the config. Shape: (1, S, T*D).
            context: Extended in place.
        """
        fused = self.fuse(features)
        positions = context.length + torch.arange(fused.shape[1], device=fused.device)
        context.append(
            [layer.self_attn.keys_values(fused, positions) for layer in self.layers]
        )

    def hidden(self, block: Tensor, context: DrafterContext) -> Tensor:
        """Run the layers over one block at the position after the context.

        Args:
            block: Embedded anchor and mask tokens. Shape: (1, L, D).
            context: Read, not changed.

        Returns:
            Rows after the final norm. Shape: (1, L, D).
        """
        x = block.to(self.dtype)[:, None]
        rows = context.length + torch.arange(block.shape[1], device=block.device)
        for index, layer in enumerate(self.layers):
            mask = visible(
                rows,
                torch.cat([context.positions(index), rows]),
                causal=self.config.layer_is_causal(index),
                window=self.config.layer_window(index),
            )
            x = layer(x, context[index], rows, mask)
        return self.norm(x[:, 0])

    def embed_block(self, anchor: int, target: Vocabulary) -> Tensor:
        """One block, embedded and scaled. Shape: (1, L, D)."""
        return self.embed_blocks(torch.tensor([anchor], device=self.device), target)

    def embed_blocks(self, anchors: Tensor, target: Vocabulary) -> Tensor:
        """Anchors (...) and their mask tokens, embedded and scaled: (..., L, D)."""
        masks = anchors.new_full(
            (self.config.block_size - 1,), self.config.mask_token_id
        )
        tokens = torch.cat(
            [anchors[..., None], masks.expand(*anchors.shape, -1)], dim=-1
        )
        embed = self.embed_tokens if self.embed_tokens is not None else target.embed
        return embed(tokens).to(self.dtype) * self.config.input_embedding_scale

    def logits(self, hidden: Tensor, target: Vocabulary) -> Tensor:
        """The head's logits (..., V) of post-norm rows (..., D), not transformed."""
        return (self.lm_head if self.lm_head is not None else target.head)(hidden)

    def propose(
        self,
        anchor: int,
        target: Vocabulary,
        context: DrafterContext,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        confidence_threshold: float = 0.0,
    ) -> Proposal:
        """Draft one block after `anchor`, at the block size the drafter was made for.

        Args:
            anchor: The last emitted token; the context ends right before it.
            target: Its embedding and head.
            context: Read, not changed.
            temperature: 0 takes the best token of each slot, more draws one.
            generator: Where draws come from, on the drafter's device.
            confidence_threshold: Propose no slot less sure than this, and none after;
                for drafters with a confidence head.
        """
        block = self.embed_block(anchor, target)
        rows = self.hidden(block, context)[0, self.config.first_row :]
        draws = Draws(temperature, generator, confidence_threshold)
        return self.decide(rows, self.logits(rows, target), anchor, draws)

    @abc.abstractmethod
    def decide(
        self, hidden: Tensor, logits: Tensor, anchor: int, draws: Draws
    ) -> Proposal:
        """Choose one token for every slot; each family has its own way.

        Args:
            hidden: Post-norm rows of the slots. Shape: (g, D).
            logits: The head's, not yet transformed. Shape: (g, V).
            anchor: The token before the first slot.
            draws: Greedy, or how to sample.
        """
