"""Writing with PyTorch: batches padded on the left, finished rows taken out.

What all prompts of a batch begin with, such as a system message, is read once.
"""

from collections.abc import Sequence
from os.path import commonprefix

import torch
from torch import Tensor

from mlx_dflash2.torch.target import Target

from .torch_cache import roomy_cache
from .writer import Sampling, Written

KEEP = 0.75  # a batch is cut down once no more than this share of it still writes


class TorchWriter:
    """The target in PyTorch.

    Args:
        ends: Tokens that end an answer.
        batch: Prompts that are continued together.
    """

    def __init__(self, target: Target, ends: frozenset[int], *, batch: int):
        self.target, self.batch = target, batch
        self.ends = torch.tensor(sorted(ends), device=target.device)

    def write(
        self,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int,
        sampling: Sampling,
        seed: int,
    ) -> list[Written]:
        """Continue every prompt; the same again for the same arguments."""
        generator = torch.Generator(self.target.device).manual_seed(seed)
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        written: dict[int, Written] = {}
        for start in range(0, len(order), self.batch):
            rows = order[start : start + self.batch]
            batch = _Batch(self.target, [prompts[row] for row in rows])
            done = self._continue(batch, max_tokens, sampling, generator)
            written |= zip(rows, done, strict=True)
        return [written[row] for row in range(len(prompts))]

    @torch.inference_mode()
    def _continue(
        self,
        batch: "_Batch",
        max_tokens: int,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> list[Written]:
        for left in reversed(range(max_tokens)):
            chosen = choose(batch.logits, sampling, generator)
            batch.push(chosen, torch.isin(chosen, self.ends))
            if not (left and batch.rows):
                break
            batch.step(chosen)
        return batch.written()


class _Batch:
    """Rows that are being continued, and the target's state for them.

    Attributes:
        rows: Those that still write, by their number.
        logits: Of the next token, one line a row of the cache. Shape: (B, V).
    """

    def __init__(self, target: Target, prompts: list[list[int]]):
        self.target, self.cache = target, roomy_cache(target.num_layers)
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.stopped: set[int] = set()
        self.held = list(range(len(prompts)))  # rows of the cache, by their number
        shared = self._read_shared(prompts)
        rest = [prompt[shared:] for prompt in prompts]
        width = max(map(len, rest))
        padded = [[0] * (width - len(p)) + p for p in rest]
        seen = [[1] * shared + [0] * (width - len(p)) + [1] * len(p) for p in rest]
        self.mask = torch.tensor(seen, device=target.device)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, shared:]
        self.logits = self._forward(
            torch.tensor(padded, device=target.device), positions
        )

    @property
    def rows(self) -> list[int]:
        return [row for row in self.held if row not in self.stopped]

    def push(self, chosen: Tensor, ended: Tensor) -> None:
        """Take a token for every row of the cache, and note which rows it ends."""
        for row, token, end in zip(
            self.held, chosen.tolist(), ended.tolist(), strict=True
        ):
            if end:
                self.stopped.add(row)
            elif row not in self.stopped:
                self.tokens[row].append(token)

    def step(self, chosen: Tensor) -> None:
        """Compute the logits after the chosen tokens. Shape of `chosen`: (B,)."""
        if len(self.rows) <= KEEP * len(self.held):
            keep = [at for at, row in enumerate(self.held) if row not in self.stopped]
            kept = torch.tensor(keep, device=chosen.device)
            self.cache.batch_select_indices(kept)
            self.mask, chosen = self.mask[kept], chosen[kept]
            self.held = self.rows
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], -1)
        positions = self.mask.sum(-1, keepdim=True) - 1
        self.logits = self._forward(chosen[:, None], positions)

    def written(self) -> list[Written]:
        return [
            Written(tokens, "stop" if row in self.stopped else "length")
            for row, tokens in enumerate(self.tokens)
        ]

    def _read_shared(self, prompts: list[list[int]]) -> int:
        """Read what all prompts begin with once for all; how many tokens that is."""
        shared = min(len(commonprefix(prompts)), min(map(len, prompts)) - 1)
        if shared:
            tokens = torch.tensor([prompts[0][:shared]], device=self.target.device)
            self.target.forward(tokens, self.cache, logits_to_keep=1)
            self.cache.batch_repeat_interleave(len(prompts))
        return shared

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits, _ = self.target.forward(
            tokens, self.cache, logits_to_keep=1, mask=self.mask, positions=positions
        )
        return logits[:, -1]


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """A token for each row of logits. Shape: (B, V) to (B,).

    The nucleus is drawn from by rejection, which needs no sorting: a drawn token is in
    the nucleus when all likelier ones together have less than top_p.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores = logits.float()
    likely = torch.softmax(scores, -1)
    drawn_from = torch.softmax(scores / sampling.temperature, -1)
    chosen = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    missing = torch.arange(len(logits), device=logits.device)
    while len(missing):
        drawn = torch.multinomial(drawn_from[missing], 1, generator=generator)
        rows = likely[missing]
        above = torch.where(rows > rows.gather(1, drawn), rows, 0).sum(-1)
        accepted = above < sampling.top_p
        chosen[missing[accepted]] = drawn[accepted, 0]
        missing = missing[~accepted]
    return chosen
