"""Targets of text alone: a tokenizer and a chat template, no weights."""

import json
from pathlib import Path

from pair_files import EOS, EOS2, write_json, write_tokenizer

# As the target of 2B parameters renders: past reasoning stays, and an answer without
# any has an empty thought; tool calls as tags, their results in a user's turn.
KEEPS_THOUGHTS = """\
{{- bos_token }}
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool.function | tojson(ensure_ascii=False) }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}
{%- set content = m.content %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}<|im_start|>assistant
<think>
{{ thought }}
</think>

{{ content }}
{%- for call in m.tool_calls or [] %}<function name="{{ call.function.name }}">
{%- for name, value in call.function.arguments.items() -%}
<param name="{{ name }}">{{ value }}</param>
{%- endfor %}</function>
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}{% if enable_thinking %}<think>
{% else %}<think>

</think>

{% endif %}{% endif %}{% endif %}"""

# As the target of 1B renders: only what follows the last question keeps its thought.
DROPS_THOUGHTS = """\
{{- bos_token }}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content %}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last %}
{%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content %}
{%- endif %}
{%- endif %}<|im_start|>{{ m.role }}
{{ content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}{% if enable_thinking %}<think>
{% else %}<think>

</think>

{% endif %}{% endif %}{% endif %}"""


def write_text_target(
    folder: Path, template: str | None = None, *, ends: tuple[int, ...] = (EOS, EOS2)
) -> Path:
    """A folder with a byte-level tokenizer and settings; ChatML unless told."""
    folder.mkdir(parents=True)
    write_tokenizer(folder, 320, "bytelevel", max_length=4096, thinking=True)
    write_json(folder / "config.json", {"model_type": "llama", "eos_token_id": [EOS]})
    write_json(folder / "generation_config.json", {"eos_token_id": list(ends)})
    if template is not None:
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        write_json(path, settings | {"chat_template": template})
    return folder
