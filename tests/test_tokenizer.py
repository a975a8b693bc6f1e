"""The tokenizer of a target is the one its files describe."""

import json
import shutil

import pytest
from command_line import answer, assert_refused, run
from pair_files import EOS, EOS2
from pairs import Pair
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mlx_dflash2.loading import load_target

SPACES = "a b  c\n\td"
TEXTS = [
    SPACES,
    "",
    " ",
    "   ",
    "\n\n",
    "\t",
    " leading",
    "trailing ",
    "two  spaces",
    "the tea is in the pot",
    "don't, won't; can't",
    "CamelCase snake_case kebab-case",
    "x = {'a': [1, 2.5e-3]}\n",
    "    if x:\n        return y\n",
    "12345 67,890.12",
    "你好，世界",
    "🙂👨\u200d👩\u200d👧",
    "é e\u0301 ß ñ",
    "Привет мир",
    "<think>\nhm\n</think>\n\nyes",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a<|im_end|>b",
    "</s>",
    "</ s>",
    "<function name='f'>",
    "\u00a0\u2003\u200b",
    "\ufffd",
    "a\r\nb",
    "http://example.org/a?b=c&d=%20",
    "∑∫√ ≤ ≥",
]


def copy_of(pair, folder, **settings):
    """A private target; `settings` go into tokenizer_config.json, None removes."""
    shutil.copytree(pair.target, folder)
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return folder


@pytest.fixture(scope="module")
def made(pair):
    return pair("random", thinking=True)


CLASSES = ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast", None]


def assert_reads_as_its_file(folder):
    _, tokenizer = load_target(folder)
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == plain.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", CLASSES)
def test_any_class_reads_a_byte_level_file_as_it_is(made, tmp_path, name):
    assert_reads_as_its_file(copy_of(made, tmp_path / "t", tokenizer_class=name))


def test_spaces_survive_a_transformers_that_loses_them(made, tmp_path, monkeypatch):
    """Releases that do not look into tokenizer.json give the llama class its way."""
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "_tokenizer_json_has_byte_level",
        classmethod(lambda *_, **__: False),
        raising=False,
    )
    folder = copy_of(made, tmp_path / "t", tokenizer_class="LlamaTokenizer")
    broken = AutoTokenizer.from_pretrained(folder)
    ids = broken.encode(SPACES, add_special_tokens=False)
    assert broken.decode(ids) == "abcd"
    assert_reads_as_its_file(folder)
    _, tokenizer = load_target(folder)
    assert tokenizer.eos_token_ids == {EOS, EOS2}
    assert tokenizer.bos_token == "<s>" and tokenizer.has_chat_template


@pytest.mark.parametrize(("end", "name"), [(EOS, "</s>"), (EOS2, "<|im_end|>")])
def test_both_ends_of_a_llama_class_stop(made, tmp_path, end, name):
    folder = copy_of(made, tmp_path / "t", tokenizer_class="LlamaTokenizer")
    forced = "--logit-bias", json.dumps({end: 100})
    found = answer(Pair(folder, made.drafter, made.options), "a", "-m", 5, *forced)
    assert (found["tokens"], found["finish_reason"]) == ([end], "stop")
    _, tokenizer = load_target(folder)
    assert tokenizer.decode([end]) == name


def test_a_chat_template_in_a_file_of_its_own_counts(made, tmp_path):
    folder = copy_of(made, tmp_path / "t", chat_template=None)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    _, tokenizer = load_target(folder)
    messages = [{"role": "user", "content": "a"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "a!"


def test_a_folder_without_tokenizer_config_loads(made, tmp_path):
    folder = copy_of(made, tmp_path / "t")
    (folder / "tokenizer_config.json").unlink()
    assert_reads_as_its_file(folder)
    result = run("generate", "a", "--plain", "--model", folder)
    assert_refused(result, "no chat template", "--ignore-chat-template")


def test_code_beside_a_tokenizer_is_never_run(made, tmp_path, caplog, monkeypatch):
    ran = tmp_path / "ran"
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    folder = copy_of(
        made,
        tmp_path / "t",
        tokenizer_class="Unheard",
        auto_map={"AutoTokenizer": ["code.Unheard", None]},
    )
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w')\nclass Unheard: pass\n")
    assert_reads_as_its_file(folder)
    assert not ran.exists()
    assert any("auto_map is ignored" in message for message in caplog.messages)
