"""Tokens to text as it is decided: nothing lost, nothing taken back."""

import mlx.core as mx
import numpy as np
import pytest
from pair_files import BOS, build_tokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds
from transformers import PreTrainedTokenizerFast

from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.generation import stream_generate
from mlx_dflash2.loading import load_drafter, load_target
from mlx_dflash2.text import TextStream, encode_prompt, repeats

MIXED = "你好🙂👨\u200d👩\u200d👧 é"


def byte_level():
    return build_tokenizer(400, "bytelevel", thinking=True, bos_twice=False)


def metaspace():
    """As SentencePiece's llama: spaces as \\u2581, unknown characters as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdefgh", "é", "\u2581a", "ab"]
    model = kinds.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[("\u2581", "a"), ("a", "b")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    replace = decoders.Replace("\u2581", " ")
    rest = decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([replace, *rest])
    return tokenizer


def wrapped(tokenizer):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.fixture(
    scope="module", params=[byte_level, metaspace], ids=lambda f: f.__name__
)
def tokenizer(request):
    return wrapped(request.param())


@pytest.fixture(scope="module")
def bytewise():
    return wrapped(byte_level())


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def raw(tokenizer, data):
    """One token a byte; both vocabularies have them in order."""
    vocabulary = tokenizer.get_vocab()
    zero = vocabulary["<0x00>" if "<0x00>" in vocabulary else "\u0100"]
    return [zero + byte for byte in data]


def streamed(tokenizer, ids, stops=()):
    """The pieces of a whole stream; checks that `text` is what was given out."""
    stream, pieces = TextStream(tokenizer, stops), []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    assert stream.finish() == ""
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        MIXED,
        "a b  c\n\td",
        " a",
        "ééééé",
        "ab 🙂",
        "\ufffd",
        "a\ufffd\ufffdb",
        "你\ufffd",
    ],
    ids=ascii,
)
def test_pieces_joined_are_the_whole_text(tokenizer, text):
    ids = encode(tokenizer, text)
    whole = tokenizer.decode(ids)
    assert whole.lstrip(" ") == text.lstrip(" ")  # a Metaspace decoder drops the first
    assert "".join(streamed(tokenizer, ids)) == whole


def test_text_in_words_is_given_out_word_by_word():
    tokenizer = wrapped(
        build_tokenizer(64, "wordlevel", thinking=False, bos_twice=False)
    )
    ids = encode(tokenizer, "t9 t33 t9 t10")
    assert streamed(tokenizer, ids) == ["t9", " t33", " t9", " t10", ""]


def test_a_limit_inside_a_character_shows_no_part_of_it(tokenizer):
    ids = encode(tokenizer, MIXED)
    assert len(ids) > len(MIXED)
    for count in range(len(ids) + 1):
        text = "".join(streamed(tokenizer, ids[:count]))
        assert MIXED.startswith(text)  # hence no U+FFFD
        complete = tokenizer.decode(ids[:count]).rstrip("\ufffd")
        assert len(text) >= len(complete)


def test_a_character_is_given_out_with_its_last_byte(bytewise):
    ids = encode(bytewise, "你🙂a")
    assert streamed(bytewise, ids) == ["", "", "你", "", "", "", "🙂", "a", ""]


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"\xff" * 9,
        b"a\xffb",
        b"\x80\x80a",
        b"\xe4\xbda",
        b"\xf0\x9f\x99",
        b"\xe4\xbd\xa0\xff\xe5\xa5\xbd",
        b"\xc3\xc3\xa9",
        b"\xed\xa0\x80x",
        b"\xf0\x9f\xf0\x9f\x99\x82",
        "a\ufffd".encode(),
        "\ufffd".encode() + b"\xff",
    ],
)
def test_bytes_that_are_no_text_are_shown_as_the_decoder_shows_them(bytewise, data):
    ids = raw(bytewise, data)
    whole = data.decode("utf-8", "replace")
    assert bytewise.decode(ids) == whole
    cut = data[-3:] == b"\xf0\x9f\x99"  # more bytes could still complete it
    assert "".join(streamed(bytewise, ids)) == (whole[:-1] if cut else whole)


def test_bytes_that_are_no_text_are_not_held_back(bytewise):
    pieces = streamed(bytewise, raw(bytewise, b"\xff" * 5))
    assert pieces == ["\ufffd"] * 5 + [""]


def test_bytes_after_a_finished_character_do_not_take_it_back(tokenizer):
    for data in (b"\xe4\xbd\xa0\xff", b"\xe4\xbd\xa0\xe5\xa5", b"a\xc3"):
        assert "".join(streamed(tokenizer, raw(tokenizer, data))) in (
            "你\ufffd",
            "你\ufffd\ufffd\ufffd",  # a fallback to bytes shows each of a bad run
            "你",
            "a",
        )


@pytest.mark.parametrize("tag", ["<function", "</function>", "<|im_start|>", "<think>"])
def test_tags_are_shown_special_or_not(tag):
    plain = byte_level()
    plain.add_special_tokens(["<function", "</function>"])
    tokenizer = wrapped(plain)
    ids = encode(tokenizer, f"a {tag} b")
    assert tokenizer.convert_tokens_to_ids(tag) in ids
    assert "".join(streamed(tokenizer, ids)) == f"a {tag} b"


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("one END two", ["END"], "one "),
        ("one END two", ["nothing"], "one END two"),
        ("one END", ["END"], "one "),
        ("END", ["END"], ""),
        ("one EN", ["END"], "one EN"),
        ("EEEND", ["END"], "EE"),
        ("EENEND", ["END"], "EEN"),
        ("aab", ["ab", "b"], "a"),
        ("abcdef", ["ef", "cd"], "ab"),
        ("abcdef", ["bcx", "cd"], "ab"),
        ("abcabd", ["abd"], "abc"),
        ("你好吗", ["好"], "你"),
        ("你好吗", ["吗"], "你好"),
        ("x🙂y", ["🙂y"], "x"),
        ("x🙂y", ["y"], "x🙂"),
        ("a\n\nb", ["\n\n"], "a"),
        ("a  b", ["  "], "a"),
        ("a<|im_start|>b", ["<|im_start|>"], "a"),
        ("a<|im_start|>b", ["|im"], "a<"),
    ],
    ids=ascii,
)
def test_the_first_stop_string_ends_the_text(bytewise, text, stops, kept):
    ids = encode(bytewise, text)
    pieces = streamed(bytewise, ids, stops)
    assert "".join(pieces) == kept
    given = ""
    for piece in pieces:
        given += piece
        assert kept.startswith(given)  # a partial match was never given out
    stopped = TextStream(bytewise, stops)
    for token in ids:
        stopped.push(token)
    assert stopped.stopped == (kept != text)
    assert stopped.text == kept[: len(stopped.text)]


def test_nothing_follows_a_stop_string(bytewise):
    stream = TextStream(bytewise, ["b"])
    pieces = [stream.push(token) for token in raw(bytewise, b"abcdefb")]
    assert pieces == ["a", "", "", "", "", "", ""]
    assert stream.finish() == "" and stream.text == "a"


def test_a_partial_match_that_fails_is_given_out_at_once(bytewise):
    ids = raw(bytewise, b"xENDyz")
    assert streamed(bytewise, ids, ["ENDx"]) == ["x", "", "", "", "ENDy", "z", ""]


def test_one_stop_string_may_come_without_a_list(bytewise):
    assert "".join(streamed(bytewise, raw(bytewise, b"aENDb"), "END")) == "a"


@pytest.mark.parametrize("stop", ["", "\udcff"])
def test_a_stop_string_that_cannot_be_met_is_refused(bytewise, stop):
    with pytest.raises(DFlash2Error, match="stop string"):
        TextStream(bytewise, ["a", stop])


def test_a_loop_of_tokens_is_recognised():
    assert repeats([5] * 64) == 1
    assert repeats([1, 2, 3] * 30) == 3
    assert repeats([9, 8] + [1, 2, 3] * 30) == 3
    assert repeats([5] * 63) is None
    assert repeats(list(range(100))) is None
    assert repeats([1, 2, 3] * 30 + [4]) is None
    assert repeats(list(range(17)) * 6) is None  # too long a period to be a loop


@pytest.fixture(scope="module")
def loaded(pair):
    made = pair("random", thinking=True, template_bos=True)
    target, tokenizer = load_target(made.target)
    return target, load_drafter(made.drafter, target), tokenizer


@pytest.mark.parametrize("with_drafter", [True, False])
@pytest.mark.parametrize("missing", range(4))
def test_a_generation_gives_out_characters_whole(loaded, with_drafter, missing):
    target, drafter, tokenizer = loaded
    prompt, ids = [40, 41, 42], encode(tokenizer, MIXED)

    def force(tokens, logits):
        wanted = ids[min(len(tokens) - len(prompt), len(ids) - 1)]
        return mx.where(mx.arange(logits.shape[-1]) == wanted, logits, -mx.inf)

    stream = stream_generate(
        target,
        drafter if with_drafter else None,
        tokenizer,
        prompt,
        max_tokens=len(ids) - missing,
        logits_processors=[force],
    )
    pieces = [response.text for response in stream]
    assert stream.generation.tokens == ids[: len(ids) - missing]
    assert "".join(pieces) == stream.generation.text
    cut = {0: MIXED, 1: MIXED[:-1], 2: MIXED[:-1], 3: MIXED[:-2]}
    assert stream.generation.text == cut[missing]


def test_a_stream_closed_early_gives_out_what_was_held_back(loaded):
    target, _, tokenizer = loaded
    ids = encode(tokenizer, "xEND")
    stream = stream_generate(
        target,
        None,
        tokenizer,
        [40],
        stop="ENDLESS",
        logits_processors=[
            lambda tokens, logits: mx.where(
                mx.arange(logits.shape[-1]) == ids[min(len(tokens), len(ids)) - 1],
                logits,
                -mx.inf,
            )
        ],
    )
    for _ in ids:
        next(stream)
    assert stream.generation.text == "x"
    stream.close()
    stream.close()
    assert stream.generation.text == "xEND"


@pytest.mark.parametrize("text", ["a b", "<s>a b", " <s>a", "你好"])
def test_a_string_is_encoded_as_mlx_lm_does(loaded, text):
    _, _, tokenizer = loaded
    expected = tokenizer.encode(text, add_special_tokens=not text.startswith("<s>"))
    assert encode_prompt(tokenizer, text) == expected
    assert expected[0] == BOS  # this tokenizer adds one


@pytest.mark.parametrize(
    "prompt",
    [
        [7, 8, 9],
        (7, 8, 9),
        range(7, 10),
        mx.array([7, 8, 9]),
        mx.array([7, 8, 9], mx.uint32),
        np.array([7, 8, 9]),
        list(np.array([7, 8, 9])),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_token_ids_come_as_a_sequence_or_an_array(loaded, prompt):
    ids = encode_prompt(loaded[2], prompt)
    assert ids == [7, 8, 9]
    assert {type(token) for token in ids} == {int}


def test_messages_are_rendered_with_the_given_variables(loaded):
    _, _, tokenizer = loaded
    messages = [{"role": "user", "content": "hi"}]
    head = "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    for options, ending in (
        (None, ""),
        ({"enable_thinking": True}, "<think>\n"),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
    ):
        ids = encode_prompt(tokenizer, messages, options)
        assert ids == tokenizer.encode(head + ending, add_special_tokens=False)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        7,
        1.5,
        [[7, 8]],
        [7.0, 8.0],
        [7, None],
        ["a"],
        {"role": "user"},
        mx.array([[7, 8]]),
        mx.array(7),
        mx.array([7.0]),
        np.array([7.0]),
        np.array([[7]]),
        [b"x"],
    ],
    ids=ascii,
)
def test_what_is_no_prompt_is_refused(loaded, prompt):
    with pytest.raises(
        DFlash2Error, match="must be a string, messages, or a flat list"
    ):
        encode_prompt(loaded[2], prompt)


@pytest.mark.parametrize("prompt", [[], mx.array([], mx.int32), np.array([], int)])
def test_an_empty_prompt_is_refused(loaded, prompt):
    with pytest.raises(DFlash2Error, match="prompt is empty"):
        encode_prompt(loaded[2], prompt)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "\udcff"}],
        [{"role": "user", "content": "a"}, "b"],
        [{"content": "a"}],
        [{"role": "user", "content": "a"}, {}],
    ],
    ids=ascii,
)
def test_messages_that_cannot_be_rendered_are_refused(loaded, messages):
    with pytest.raises(DFlash2Error):
        encode_prompt(loaded[2], messages)


def test_a_string_that_is_no_text_is_refused(loaded):
    with pytest.raises(DFlash2Error, match="not Unicode text.*character 1"):
        encode_prompt(loaded[2], "a\udcff")


@pytest.mark.parametrize("token", [-1, 512, 10**9])
def test_token_ids_outside_the_vocabulary_are_refused(loaded, token):
    target, drafter, tokenizer = loaded
    with pytest.raises(DFlash2Error, match=f"token {token}, outside .* of 512"):
        stream_generate(target, drafter, tokenizer, [7, token])
