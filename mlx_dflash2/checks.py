"""What a generation needs of its arguments, before anything is computed."""

import secrets
from collections.abc import Sequence

from .decode import KVQuantization
from .errors import DFlash2Error
from .sampling import LogitsProcessor, whole
from .target import Target

KV_BITS, KV_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)


def refuse_unfit(target: Target, drafter) -> None:
    """Raise DFlash2Error for anything but a target, and a drafter of its size."""
    if not isinstance(target, Target):
        raise DFlash2Error(
            f"the target is a {type(target).__name__}; load_target returns the target "
            "and its tokenizer, pass the first of them"
        )
    if drafter is None:
        return
    config = getattr(drafter, "config", None)
    if config is None or not hasattr(drafter, "propose"):
        raise DFlash2Error(
            f"the drafter is a {type(drafter).__name__}; pass what load_drafter "
            "returns, or None"
        )
    if (config.hidden_size, config.vocab_size, config.num_target_layers) != (
        target.hidden_size,
        target.vocab_size,
        target.num_layers,
    ):
        raise DFlash2Error(
            "the drafter was loaded for a target of another size; load it for this one"
        )


def draft_width(drafter, asked: int | None) -> int:
    """Drafted tokens a cycle verifies at most; 0 without a drafter."""
    if asked is not None:
        whole("num_draft_tokens", asked, 0, None)
    if drafter is None:
        if asked:
            raise DFlash2Error(f"num_draft_tokens is {asked}, but there is no drafter")
        return 0
    trained = drafter.config.num_draft_tokens
    if asked is None:
        return trained
    if asked > trained:
        raise DFlash2Error(
            f"num_draft_tokens is {asked} (block size {asked + 1}); this drafter was "
            f"trained for {trained} (block size {trained + 1}), use 0 to {trained}"
        )
    return asked


def drafting(drafter, sampling: str | None, threshold: float) -> str:
    """How tokens are drafted at a temperature: "sample" or "argmax"."""
    if sampling not in (None, "sample", "argmax"):
        raise DFlash2Error(
            f"draft_sampling is {sampling!r}, expected 'sample' or 'argmax'"
        )
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not number or not 0 <= threshold <= 1:
        raise DFlash2Error(
            f"confidence_threshold is {threshold!r}, expected a number from 0 to 1"
        )
    if drafter is None:
        return "sample"
    if threshold > 0 and not getattr(drafter.config, "has_confidence", False):
        raise DFlash2Error(
            f"confidence_threshold is {threshold}, but this {drafter.config.title} "
            "drafter has no confidence head"
        )
    return sampling or drafter.config.draft_sampling


def seed_or_fresh(seed: int | None) -> int:
    """The seed, or for None one that no other run has."""
    if seed is None:
        return secrets.randbits(32)
    number = isinstance(seed, int) and not isinstance(seed, bool)
    if not number or not 0 <= seed < 1 << 64:
        raise DFlash2Error(
            f"seed is {seed!r}, expected a whole number from 0 to 2**64 - 1, or None"
        )
    return seed


def token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise DFlash2Error unless all are tokens of the vocabulary."""
    if not isinstance(ids, Sequence | set | frozenset) or isinstance(ids, str | bytes):
        raise DFlash2Error(f"{name} is {ids!r}, expected token ids")
    for token in ids:
        number = isinstance(token, int) and not isinstance(token, bool)
        if not number or not 0 <= token < vocab_size:
            raise DFlash2Error(
                f"{name} holds token {token!r}, outside the vocabulary of {vocab_size}"
            )


def processors(given: Sequence[LogitsProcessor] | None) -> Sequence[LogitsProcessor]:
    """A list of functions; None is an empty one."""
    given = () if given is None else given
    if callable(given) or not all(callable(processor) for processor in given):
        raise DFlash2Error("logits_processors: expected a list of functions")
    return given


def kv_quantization(
    target: Target, bits: int | None, group_size: int, start: int
) -> KVQuantization | None:
    """How to quantize the target's cache; None for not at all."""
    if bits is None:
        return None
    dim = target.model.layers[0].self_attn.head_dim
    fitting = [size for size in KV_GROUPS if dim % size == 0]
    if bits not in KV_BITS:
        raise DFlash2Error(f"kv_bits is {bits!r}, expected one of {KV_BITS}")
    if group_size not in fitting:
        raise DFlash2Error(
            f"kv_group_size is {group_size!r}, expected one that divides the head "
            f"dimension {dim}: {fitting or 'MLX has none'}"
        )
    whole("quantized_kv_start", start, 0, None)
    return KVQuantization(int(bits), group_size, start)
