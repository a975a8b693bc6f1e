"""Writing with MLX: mlx-lm's batches, which take in a prompt where an answer ends."""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from mlx_dflash2.target import Target

from .writer import Sampling, Written


class MLXWriter:
    """The target on MLX.

    Args:
        ends: Tokens that end an answer.
        batch: Prompts that are continued together.
    """

    def __init__(self, target: Target, ends: frozenset[int], *, batch: int):
        self.target, self.batch = target, batch
        self.stops = [[token] for token in sorted(ends)]

    def write(
        self,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int,
        sampling: Sampling,
        seed: int,
    ) -> list[Written]:
        """Continue every prompt; the same again for the same arguments."""
        if not prompts:
            return []
        mx.random.seed(seed)
        generator = BatchGenerator(
            self.target.model,
            stop_tokens=self.stops,
            sampler=make_sampler(sampling.temperature, top_p=sampling.top_p),
            completion_batch_size=self.batch,
            prefill_batch_size=min(self.batch, 8),
        )
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        inserted = generator.insert(
            [prompts[row] for row in order], [max_tokens] * len(order)
        )
        row_of = dict(zip(inserted, order, strict=True))
        tokens: list[list[int]] = [[] for _ in prompts]
        reasons: dict[int, str] = {}
        while responses := generator.next_generated():
            for response in responses:
                row = row_of[response.uid]
                if response.finish_reason != "stop":
                    tokens[row].append(response.token)
                if response.finish_reason is not None:
                    reasons[row] = response.finish_reason
        generator.close()
        return [Written(tokens[row], reasons[row]) for row in range(len(prompts))]
