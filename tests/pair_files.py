"""Writes what a checkpoint folder consists of: safetensors, index, tokenizer."""

import json
import struct
from pathlib import Path

import numpy as np

SPECIALS = ["<s>", "</s>", "<|im_end|>", "<|MASK|>", "<|im_start|>", "<pad>"]
BOS, EOS, EOS2, MASK, IM_START, PAD = range(6)
THINK = ["<think>", "</think>"]  # ids 6 and 7 of a thinking vocabulary, not special

MESSAGES = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
)
THREE_WAYS = (
    "{% if enable_thinking is defined %}{% if enable_thinking %}<think>\n"
    "{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

DTYPES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def encode(array: np.ndarray, dtype: str) -> bytes:
    """The bytes of a float array in `dtype`; bfloat16 rounds to nearest even."""
    array = np.ascontiguousarray(array, dtype=np.float32)
    if dtype == "float32":
        return array.tobytes()
    if dtype == "float16":
        return array.astype(np.float16).tobytes()
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> int:
    """Write one file and return the bytes of its tensors."""
    code, size = DTYPES[dtype]
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in tensors.items():
        start, end = end, end + array.size * size
        header[name] = {
            "dtype": code,
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for array in tensors.values():
            file.write(encode(array, dtype))
    return end


def write_checkpoint(
    folder: Path, tensors: dict[str, np.ndarray], dtype: str, shards: int = 1
) -> None:
    """Write `model.safetensors`, or that many shards with their index."""
    if shards <= 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return
    names = list(tensors)
    shards = min(shards, len(names))
    cuts = [round(i * len(names) / shards) for i in range(shards + 1)]
    weight_map, total = {}, 0
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[cuts[i] : cuts[i + 1]]}
        total += write_safetensors(folder / file, part, dtype)
        weight_map |= dict.fromkeys(part, file)
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def chat_template(*, thinking: bool, template_bos: bool) -> str:
    """ChatML; with `thinking` the generation prompt has MiniCPM5's three endings."""
    start = "{{ bos_token }}" if template_bos else ""
    return start + MESSAGES + (THREE_WAYS if thinking else "") + "{% endif %}"


def _byte_symbols() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in byte order."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in plain else next(spare)) for byte in range(256)]


def _byte_level_model(vocabulary: dict[str, int], size: int):
    """Byte-level BPE: all bytes, then pieces of growing length up to `size`."""
    from tokenizers import models

    for symbol in _byte_symbols():
        vocabulary[symbol] = len(vocabulary)
    letters = "etaoinshrdlucmfwygpbvkxjqz"
    merges, level = [], ["\u0120", *letters]  # \u0120 stands for a leading space
    while len(vocabulary) < size:
        longer = [(piece, letter) for piece in level for letter in letters]
        for piece, letter in longer[: size - len(vocabulary)]:
            vocabulary[piece + letter] = len(vocabulary)
            merges.append((piece, letter))
        level = [piece + letter for piece, letter in longer]
    return models.BPE(vocab=vocabulary, merges=merges, byte_fallback=False)


def build_tokenizer(size: int, kind: str, *, thinking: bool, bos_twice: bool):
    """A `tokenizers.Tokenizer` with exactly `size` ids.

    Args:
        kind: "bytelevel" (any text) or "wordlevel" (words `t6`, `t7` ...).
        thinking: Ids 6 and 7 are `<think>` and `</think>`.
        bos_twice: Encoding adds `<s>` unless told to add no special tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    added = [*SPECIALS, *(THINK if thinking else [])]
    vocabulary = {token: index for index, token in enumerate(added)}
    if kind == "bytelevel":
        tokenizer = Tokenizer(_byte_level_model(vocabulary, size))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        vocabulary |= {f"t{index}": index for index in range(len(added), size)}
        tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    if thinking:
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in THINK])
    if bos_twice:
        tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    assert tokenizer.get_vocab_size() == size, (tokenizer.get_vocab_size(), size)
    return tokenizer


def write_tokenizer(
    folder: Path,
    size: int,
    kind: str,
    *,
    max_length: int,
    thinking: bool = False,
    template_bos: bool = False,
) -> None:
    """Write tokenizer.json, tokenizer_config.json and special_tokens_map.json."""
    tokenizer = build_tokenizer(size, kind, thinking=thinking, bos_twice=template_bos)
    tokenizer.save(str(folder / "tokenizer.json"))
    specials = {
        "bos_token": SPECIALS[BOS],
        "eos_token": SPECIALS[EOS],
        "pad_token": SPECIALS[PAD],
        "mask_token": SPECIALS[MASK],
    }
    write_json(folder / "special_tokens_map.json", specials)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **specials,
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": False,
            "chat_template": chat_template(
                thinking=thinking, template_bos=template_bos
            ),
        },
    )
