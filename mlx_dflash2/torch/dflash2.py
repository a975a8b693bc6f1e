"""DFlash 2: convolved layers, and a path through the candidates of the slots."""

from torch import Tensor

from mlx_dflash2.families.dflash2 import DFlash2Config

from .conv import DynamicConv
from .drafter import Drafter
from .layers import DrafterLayer
from .proposal import Draws, Proposal
from .selector import CandidateSelector


class ConvolvedLayer(DrafterLayer):
    """Attention and MLP, each between the two sides of a convolution.

    A convolution never crosses from block to block, nor touches the context.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.attention_conv = DynamicConv(config)
        self.mlp_conv = DynamicConv(config)

    def forward(
        self,
        x: Tensor,
        context: tuple[Tensor, Tensor],
        positions: Tensor,
        mask: Tensor,
    ) -> Tensor:
        rows, delta = self.attention_conv.prepare(self.input_layernorm(x))
        rows = self.self_attn(rows, context, positions, mask)
        x = x + self.attention_conv.finish(rows, delta)
        rows, delta = self.mlp_conv.prepare(self.post_attention_layernorm(x))
        return x + self.mlp_conv.finish(self.mlp(rows), delta)


class DFlash2Drafter(Drafter):
    """The backbone with convolved layers and a candidate selector."""

    layer_class = ConvolvedLayer

    def __init__(self, config: DFlash2Config, **options):
        super().__init__(config, **options)
        self.candidate_selector = CandidateSelector(config)

    def decide(
        self, hidden: Tensor, logits: Tensor, anchor: int, draws: Draws
    ) -> Proposal:
        return self.candidate_selector.walk(
            hidden,
            logits,
            anchor,
            temperature=draws.temperature,
            generator=draws.generator,
        )
