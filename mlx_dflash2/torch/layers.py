"""One drafter layer: attention and MLP."""

from torch import Tensor, nn
from torch.nn import functional as F

from mlx_dflash2.config import DrafterConfig

from .attention import DrafterAttention, RMSNorm


class MLP(nn.Module):
    """The gated feed-forward network: down(silu(gate) * up)."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """Attention, then MLP, each added to rows that were not normed.

    Context features reach the attention as they are, without the input norm.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = DrafterAttention(config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        context: tuple[Tensor, Tensor],
        positions: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """Run the layer on N blocks at once, which see each other only as `mask` says.

        Args:
            x: Shape: (B, N, L, D).
            context: Keys and values of the context, each (B, H, S, head_dim).
            positions: Of the rows, block after block. Shape: (N*L,) or (B, N*L).
            mask: True where visible; broadcasts to (B, H, N*L, S + N*L).

        Returns:
            Shape: (B, N, L, D).
        """
        x = x + self.self_attn(self.input_layernorm(x), context, positions, mask)
        return x + self.mlp(self.post_attention_layernorm(x))
