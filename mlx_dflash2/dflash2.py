"""DFlash 2: convolved layers, and a path through the candidates of the slots."""

import mlx.core as mx

from .attention import LayerContext
from .conv import DynamicConv
from .drafter import Drafter, DrafterLayer, Draws, Proposal
from .families.dflash2 import DFlash2Config
from .selector import CandidateSelector, top_candidates


class ConvolvedLayer(DrafterLayer):
    """Attention and feed-forward, each between the two sides of a convolution."""

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        conv = (config.hidden_size, config.conv_group_size, config.conv_kernel_size)
        self.attention_conv = DynamicConv(*conv)
        self.mlp_conv = DynamicConv(*conv)

    def __call__(
        self, rows: mx.array, context: LayerContext, mask: mx.array | str | None
    ) -> mx.array:
        inner, kernels = self.attention_conv.prepare(self.input_layernorm(rows))
        inner = self.self_attn(inner, context, mask)
        rows = rows + self.attention_conv.finish(inner, kernels)
        inner, kernels = self.mlp_conv.prepare(self.post_attention_layernorm(rows))
        return rows + self.mlp_conv.finish(self.mlp(inner), kernels)


class DFlash2Drafter(Drafter):
    """The backbone with convolved layers and a candidate selector."""

    layer_class = ConvolvedLayer

    def __init__(self, config: DFlash2Config, **options):
        super().__init__(config, **options)
        self.candidate_selector = CandidateSelector(config)

    def decide(
        self, hidden: mx.array, logits: mx.array, anchor: mx.array, draws: Draws
    ) -> Proposal:
        candidates, logits = top_candidates(logits, self.config.selector_top_k)
        return self.candidate_selector.propose(
            hidden,
            anchor,
            candidates,
            self.transform(logits),
            temperature=draws.temperature,
            key=draws.key,
        )
