"""Tokens to text as it is decided, and prompts to tokens."""

import codecs
import operator
import re
from collections.abc import Sequence

from .errors import DFlash2Error

INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that are not a character yet
LONGEST = 4  # bytes of a character in UTF-8


class TextStream:
    """Turns tokens into pieces of text that never have to be taken back.

    A piece never ends inside a character, and text that may be the start of a stop
    string is held back. Special tokens are shown: MiniCPM5 marks tool calls with them.

    Args:
        tokenizer: Anything with Hugging Face's `decode` and `convert_ids_to_tokens`.
        stops: Strings that end the text; they are cut from it.

    Attributes:
        text: Everything given out so far.
        stopped: A stop string was found; nothing more will be given out.

    Raises:
        DFlash2Error: A stop string is empty, or no text.
    """

    def __init__(self, tokenizer, stops: Sequence[str] | str = ()):
        self._tokenizer = tokenizer
        self._stops = [stops] if isinstance(stops, str) else list(stops)
        for stop in self._stops:
            if not isinstance(stop, str):
                raise DFlash2Error(f"a stop string is {stop!r}, expected text")
            if not stop:
                raise DFlash2Error("a stop string is empty; give the text that ends")
            check_text(stop, "a stop string")
        self._tokens: list[int] = []
        self._from = self._read = 0  # a window of tokens to decode, its known part
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; the text that became certain."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._from : self._read])
        window = self._decode(self._tokens[self._from :])
        if window.endswith(INCOMPLETE) and self._is_inside_character():
            return ""
        self._from, self._read = self._read, len(self._tokens)
        return self._release(window[len(known) :])

    def finish(self) -> str:
        """The rest: what was held back, without an incomplete last character."""
        if self.stopped:
            return ""
        known = self._decode(self._tokens[self._from : self._read])
        window = self._decode(self._tokens[self._from :])
        if window.endswith(INCOMPLETE) and self._is_inside_character():
            window = window.rstrip(INCOMPLETE)
        piece = self._release(window[len(known) :])
        self._from = self._read = len(self._tokens)
        rest, self._held = self._held, ""
        if self.stopped:
            rest = ""
        self.text += rest
        return piece + rest

    def _release(self, piece: str) -> str:
        """Give out what no stop string can claim any more."""
        held = self._held + piece
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.stopped, held, keep = True, held[: min(found)], 0
        else:
            keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        piece, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += piece
        return piece

    def _is_inside_character(self) -> bool:
        """Whether more bytes can still complete the last character."""
        last = self._tokenizer.convert_ids_to_tokens(self._tokens[-LONGEST:])
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(_token_bytes(token or "") for token in last))
        return decoder.getstate()[0] != b""

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _byte_symbols() -> dict[str, int]:
    """Byte by printable stand-in, of byte-level BPE (GPT-2)."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return {chr(byte if byte in plain else next(spare)): byte for byte in range(256)}


_BYTES = _byte_symbols()


def _token_bytes(token: str) -> bytes:
    """Bytes of a token as its vocabulary spells it; it is not whole characters."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):  # SentencePiece's fallback to bytes
        return bytes([int(token[3:5], 16)])
    if all(symbol in _BYTES for symbol in token):
        return bytes(_BYTES[symbol] for symbol in token)
    return token.encode()


def check_text(text: str, what: str) -> None:
    """Raise DFlash2Error for a string that has no UTF-8 form."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DFlash2Error(
            f"{what} is not Unicode text: {error.object[error.start]!r} at character "
            f"{error.start} stands for a byte of another encoding; give it in UTF-8"
        ) from None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


def encode_prompt(tokenizer, prompt, template_options: dict | None = None) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: mlx-lm's wrapper, or transformers' tokenizer.
        prompt: A string, encoded as mlx-lm does (with special tokens unless it begins
            with the bos text); a list of messages, rendered by the chat template; or
            token ids as a list or an array.
        template_options: Variables for the chat template.

    Raises:
        DFlash2Error: The prompt is empty, no text, or of another kind.
    """
    if isinstance(prompt, str):
        check_text(prompt, "the prompt")
        bos = tokenizer.bos_token
        ids = tokenizer.encode(
            prompt, add_special_tokens=bos is None or not prompt.startswith(bos)
        )
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        ids = render_chat(tokenizer, prompt, template_options or {})
    else:
        ids = _token_ids(prompt)
    if not ids:
        raise DFlash2Error("the prompt is empty; give at least one token of text")
    return ids


def _token_ids(prompt) -> list[int]:
    """Token ids given as a sequence or a flat array."""
    try:
        return list(map(operator.index, getattr(prompt, "tolist", lambda: prompt)()))
    except TypeError:
        raise DFlash2Error(
            "the prompt must be a string, messages, or a flat list or array of token "
            f"ids; found {type(prompt).__name__}"
        ) from None


def render_chat(tokenizer, messages: list[dict], options: dict) -> list[int]:
    """Token ids of messages in the tokenizer's chat template.

    A last message of the assistant is continued. Template variables that are not in
    `options` stay undefined, so the template's own defaults hold. The template writes
    the bos text itself, therefore none is added.
    """
    wrapped = hasattr(tokenizer, "has_chat_template")
    inner = tokenizer._tokenizer if wrapped else tokenizer  # the wrapper sets thinking
    known = tokenizer.has_chat_template if wrapped else inner.chat_template is not None
    if not known:
        raise DFlash2Error(
            "this tokenizer has no chat template; pass the prompt as plain text "
            "(--ignore-chat-template)"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message:
            raise DFlash2Error(
                f"message {number} of the prompt is no mapping with a role: {message!r}"
            )
    continued = messages[-1]["role"] == "assistant"
    try:
        text = inner.apply_chat_template(
            messages,
            tokenize=False,
            continue_final_message=continued,
            add_generation_prompt=not continued,
            **options,
        )
    except Exception as error:  # a template may raise anything
        raise DFlash2Error(f"the chat template failed: {error}") from error
    check_text(text, "the prompt")
    return tokenizer.encode(text, add_special_tokens=False)


def repeats(tokens: Sequence[int], *, least: int = 64) -> int | None:
    """The period of a loop the last `least` tokens are caught in, or None."""
    tail = list(tokens[-least:])
    if len(tail) < least:
        return None
    periods = range(1, least // 4 + 1)
    return next((p for p in periods if tail[p:] == tail[:-p]), None)
