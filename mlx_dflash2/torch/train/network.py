"""The drafter's forward over all blocks of a batch at once."""

from functools import partial

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..drafter import Drafter, Vocabulary
from .batch import Batch
from .blocks import Blocks, block_mask


def block_rows(
    drafter: Drafter,
    target: Vocabulary,
    batch: Batch,
    features: Tensor,
    blocks: Blocks,
    *,
    recompute: bool = False,
) -> Tensor:
    """Run the layers as decoding does, for N blocks of each row in one pass.

    The context is fused once, and its keys and values are computed once a layer;
    every block sees the part before its anchor.

    Args:
        drafter: Its layers are those that decode.
        target: Its embedding.
        batch: The rows the blocks are of.
        features: As captured. Shape: (B, S, T*D).
        blocks: N of each row.
        recompute: Keep no activations inside layers; compute them again for the
            gradient.

    Returns:
        Post-norm rows of the slots. Shape: (B, N, G, D).
    """
    config = drafter.config
    fused = drafter.fuse(features)
    x = drafter.embed_blocks(batch.tokens.gather(1, blocks.anchors), target)
    rows = blocks.positions(batch, config.block_size).flatten(1)
    masks: dict[tuple, Tensor] = {}
    for index, layer in enumerate(drafter.layers):
        kind = config.layer_is_causal(index), config.layer_window(index)
        if kind not in masks:
            masks[kind] = block_mask(batch, blocks, config, index)

        def run(x: Tensor, fused: Tensor, *, layer=layer, mask=masks[kind]) -> Tensor:
            context = layer.self_attn.keys_values(fused, batch.positions)
            return layer(x, context, rows, mask)

        if recompute:
            run = partial(checkpoint, run, use_reentrant=False)
        x = run(x, fused)
    return drafter.norm(x[:, :, config.first_row :])
