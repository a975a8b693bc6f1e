"""The built-in prompts: enough of them, mixed, unlike one another, renderable."""

import json
import re

import pytest
from pair_files import build_tokenizer, chat_template
from transformers import PreTrainedTokenizerFast

from mlx_dflash2.bench.workload import PROMPTS, built_in
from mlx_dflash2.text import encode_prompt

DOMAINS = ["coding", "agentic", "math", "general"]
SHORT, LONG = 440, 1400  # bytes of UTF-8; about 110 and 350 tokens
LINES = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}"
    "{{ tool | tojson(ensure_ascii=False) }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<function name='{{ call.function.name }}'>"
    "{% for name, value in call.function.arguments.items() %}"
    "<param name='{{ name }}'>{{ value }}</param>{% endfor %}</function>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def of(domain):
    return [line for line in LINES if line["domain"] == domain]


def texts(line):
    """What is said in a conversation, tool calls included."""
    return [
        message["content"] + json.dumps(message.get("tool_calls", ""))
        for message in line["messages"]
    ]


def size(line):
    return sum(len(text.encode()) for text in texts(line))


def called(line):
    return [
        call["function"]
        for message in line["messages"]
        for call in message.get("tool_calls", [])
    ]


def tokenizer(template):
    made = build_tokenizer(400, "bytelevel", thinking=False, bos_twice=False)
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)


def rendered(prompt, template, **options):
    """The text a target is shown, by way of its tokens."""
    reads = tokenizer(template)
    return reads.decode(encode_prompt(reads, prompt.messages, options))


def test_the_four_domains_have_twelve_prompts_each():
    assert built_in().as_dict()["domains"] == dict.fromkeys(DOMAINS, 12)


def test_no_two_prompts_are_alike():
    assert len({line["name"] for line in LINES}) == len(LINES)
    said = [m["content"] for line in LINES for m in line["messages"] if m["content"]]
    assert len(set(said)) == len(said)
    assert len({prompt.sha256 for prompt in built_in().prompts}) == len(LINES)


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("count", [4, 6, 8, 12])
def test_the_first_prompts_of_a_domain_are_a_fair_sample(domain, count):
    lines = of(domain)[:count]
    languages = [line["language"] for line in lines]
    assert count / 4 <= languages.count("zh") <= languages.count("en")
    sizes = [size(line) for line in lines]
    assert sum(size < SHORT for size in sizes) >= count / 4
    assert sum(size > LONG for size in sizes) >= count / 4
    assert any(len(line["messages"]) > 2 for line in lines)


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_default_six_have_both_lengths_in_both_languages(domain):
    kinds = {
        (line["language"], "short" if size(line) < SHORT else "long")
        for line in of(domain)[:6]
        if not SHORT <= size(line) <= LONG
    }
    assert len(kinds) == 4


@pytest.mark.parametrize("line", LINES, ids=lambda line: line["name"])
def test_a_prompt_is_named_by_its_domain_and_in_its_language(line):
    assert re.fullmatch(line["domain"] + r"-\d\d", line["name"])
    chinese = [bool(re.search(r"[\u4e00-\u9fff]", text)) for text in texts(line)]
    asks = [message["role"] == "user" for message in line["messages"]]
    assert all(
        chinese[i] == (line["language"] == "zh") for i, ask in enumerate(asks) if ask
    )


@pytest.mark.parametrize("prompt", built_in().prompts, ids=lambda prompt: prompt.name)
def test_a_prompt_renders_whole(prompt):
    for template in (chat_template(thinking=True, template_bos=False), TOOLS_TEMPLATE):
        text = rendered(prompt, template, tools=prompt.tools)
        assert all(message["content"] in text for message in prompt.messages)
        assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("prompt", built_in(domains=["agentic"]).prompts)
def test_tools_and_calls_are_rendered_by_a_template_that_writes_them(prompt):
    text = rendered(prompt, TOOLS_TEMPLATE, tools=prompt.tools)
    for tool in prompt.tools:
        assert json.dumps(tool, ensure_ascii=False) in text
    for message in prompt.messages:
        for call in message.get("tool_calls", []):
            assert f"<function name='{call['function']['name']}'>" in text


def test_only_agentic_prompts_have_tools():
    assert [line["domain"] for line in LINES if "tools" in line] == ["agentic"] * 12


@pytest.mark.parametrize("line", of("agentic"), ids=lambda line: line["name"])
def test_calls_are_ones_the_tools_allow(line):
    parameters = {
        tool["function"]["name"]: tool["function"]["parameters"]
        for tool in line["tools"]
    }
    assert len(parameters) == len(line["tools"])
    for schema in parameters.values():
        assert set(schema["required"]) <= schema["properties"].keys()
    for call in called(line):
        schema, given = parameters[call["name"]], call["arguments"].keys()
        assert set(schema["required"]) <= given <= schema["properties"].keys()


@pytest.mark.parametrize("line", of("agentic"), ids=lambda line: line["name"])
def test_every_call_is_followed_by_its_result(line):
    results = [m["name"] for m in line["messages"] if m["role"] == "tool"]
    assert [call["name"] for call in called(line)] == results


def test_nothing_is_cut_from_a_built_in_prompt():
    for line, prompt in zip(LINES, built_in().prompts, strict=True):
        assert prompt.messages == line["messages"]
        assert prompt.tools == line.get("tools")
