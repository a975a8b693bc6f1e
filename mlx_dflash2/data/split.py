"""Which texts are held out: by what was asked, so that no prompt is on both sides."""

import hashlib
import heapq
import unicodedata
from collections.abc import Iterable

from mlx_dflash2.conversations import Conversation
from mlx_dflash2.errors import DFlash2Error

KEYS = 2**64  # prompts are spread evenly over so many keys


def prompt_key(item: Conversation | str) -> int:
    """A number below KEYS for the first thing asked, or for a plain text.

    Case, spacing and Unicode's ways to write a character make no difference.
    """
    text = item if isinstance(item, str) else _first_question(item)
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return int.from_bytes(hashlib.sha256(plain.encode()).digest()[:8])


def _first_question(conversation: Conversation) -> str:
    asked = (m["content"] for m in conversation.messages if m["role"] == "user")
    return next(asked, "")


def held_out_below(held_out: float, items: Iterable[Conversation | str]) -> int:
    """The key below which prompts are held out.

    Args:
        held_out: Below 1 the share of all prompts, the same ones in every data set.
            Otherwise how many of the different prompts of `items`, which only then
            are read.

    Raises:
        DFlash2Error: It is above 1 and no whole number.
    """
    if held_out < 1:
        return int(held_out * KEYS)
    if held_out != int(held_out):
        raise DFlash2Error(
            f"--held-out is {held_out:g}, expected a share below 1 or a whole number "
            "of prompts"
        )
    lowest = heapq.nsmallest(int(held_out), {prompt_key(item) for item in items})
    return lowest[-1] + 1
