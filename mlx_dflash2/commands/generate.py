"""`mlx-dflash2 generate`: load, generate, print."""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from ..errors import DFlash2Error
from .drafters import load_named_drafter, name_drafter

LOW_ACCEPTANCE = 1.5  # below, a cycle seldom pays for its draft and wider verify
ENOUGH_CYCLES = 16
TEMPLATE_ARGUMENTS = {  # of the tokenizer's own function
    *("conversation", "chat_template", "tokenize", "return_dict", "return_tensors"),
    *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
}


def run_generate(options: dict[str, Any]) -> int:
    """Load, generate, print; the exit code."""
    messages = _messages(options)
    width = _draft_width(options)
    if options["max_kv_size"] is not None:
        raise DFlash2Error(
            "--max-kv-size is not supported: a rotating cache cannot be rolled back "
            "after a rejected draft, and mlx-lm's llama models ignore it"
        )
    plain_reason = _plain_reason(options, width)
    _refuse_contradictions(options, plain_reason)
    began = time.perf_counter()
    target, drafter, tokenizer, plain_reason = _load(options, plain_reason)
    load_seconds = time.perf_counter() - began
    arguments = _arguments(options, tokenizer, messages, width)
    run = _Run(options, target, drafter, tokenizer, arguments)
    interrupted = run.stream()
    comparison = run.compare() if options["verify"] and not interrupted else None
    if options["as_json"] and not interrupted:
        click.echo(json.dumps(run.as_dict(load_seconds, plain_reason, comparison)))
    run.footer(plain_reason, comparison)
    if interrupted:
        return 130
    return 1 if comparison is not None and comparison.kind == "difference" else 0


def _messages(options: dict[str, Any]) -> list[dict] | str:
    """The prompt as messages, or as text when the chat template is ignored."""
    text, given = options["text"], options["prompt"]
    if (text is None) == (given is None):
        raise DFlash2Error(
            "give one prompt, as an argument or with --prompt; - reads it from stdin"
        )
    text = given if text is None else text
    if text == "-":
        text = _read_stdin()
    else:
        text = text.replace("\\n", "\n").replace("\\t", "\t")
    if options["ignore_chat_template"]:
        for name in ("system_prompt", "prefill_response", "chat_template_config"):
            if options[name] is not None:
                flag = name.replace("_", "-")
                raise DFlash2Error(f"--{flag} needs the chat template that is ignored")
        if options["enable_thinking"] is not None:
            raise DFlash2Error("thinking is set by the chat template that is ignored")
        return text
    roles = {
        "system": options["system_prompt"],
        "user": text,
        "assistant": options["prefill_response"],
    }
    return [
        {"role": role, "content": content}
        for role, content in roles.items()
        if content is not None
    ]


def _read_stdin() -> str:
    if sys.stdin is None:
        raise DFlash2Error("the prompt is -, but stdin is closed")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DFlash2Error(f"stdin is not UTF-8 ({error.reason})") from None


def _draft_width(options: dict[str, Any]) -> int | None:
    """`--num-draft-tokens`, also when given as `--block-size`."""
    block, width = options["block_size"], options["num_draft_tokens"]
    if block is None:
        return width
    if block < 1:
        raise DFlash2Error(f"--block-size is {block}, expected 1 (no drafting) or more")
    if width is not None and width != block - 1:
        raise DFlash2Error(
            f"--block-size {block} means --num-draft-tokens {block - 1}, but "
            f"--num-draft-tokens is {width}; give one of them"
        )
    return block - 1


def _plain_reason(options: dict[str, Any], width: int | None) -> str | None:
    if options["plain"]:
        return "--plain"
    return "no drafted tokens were asked for" if width == 0 else None


def _refuse_contradictions(options: dict[str, Any], plain_reason: str | None) -> None:
    if plain_reason:
        for name, effect in (
            ("verify", "has nothing to compare"),
            ("allow_fallback", "has no effect"),
        ):
            if options[name]:
                flag = name.replace("_", "-")
                raise DFlash2Error(f"--{flag} {effect}: {plain_reason}")
    if options["verify"] and options["allow_fallback"]:
        raise DFlash2Error(
            "--verify needs the drafter and --allow-fallback does without it; give one "
            "of them"
        )
    if options["verify"] and options["temp"] > 0:
        raise DFlash2Error("--verify compares greedy output; use --temp 0")


def _load(options: dict[str, Any], plain_reason: str | None):
    """Target, drafter, tokenizer, and for no drafter the reason."""
    from ..loading import load_target

    drafter, reason = None, plain_reason
    if not reason:
        _, reason = _or_reason(options, partial(name_drafter, options))
    target, tokenizer = load_target(
        options["model"], revision=options["revision"], offline=options["offline"]
    )
    if not reason:
        load = partial(load_named_drafter, options, target)
        drafter, reason = _or_reason(options, load)
    return target, drafter, tokenizer, reason


def _or_reason(options: dict[str, Any], find: Callable) -> tuple[Any, str | None]:
    """What `find` returns; where a fallback is allowed, or why it cannot."""
    try:
        return find(), None
    except DFlash2Error as error:
        if not options["allow_fallback"]:
            raise
        reason = " ".join(str(error).split())
    click.echo(f"Decoding plainly, the drafter cannot be used: {reason}", err=True)
    return None, reason


def _arguments(
    options: dict[str, Any], tokenizer, prompt: list[dict] | str, width: int | None
) -> dict[str, Any]:
    """Keyword arguments of `stream_generate`."""
    template = dict(options["chat_template_config"] or {})
    taken = sorted(template.keys() & TEMPLATE_ARGUMENTS)
    if taken:
        raise DFlash2Error(
            f"--chat-template-config sets {taken[0]}, which is no template variable"
        )
    thinking = options["enable_thinking"]
    if thinking is not None:
        if template.setdefault("enable_thinking", thinking) != thinking:
            raise DFlash2Error(
                "--chat-template-config sets enable_thinking to "
                f"{json.dumps(template['enable_thinking'])}, the thinking flag to "
                f"{json.dumps(thinking)}; give one of them"
            )
    if "" in options["stop"]:
        raise DFlash2Error("--stop is empty; give the text that ends the answer")
    same = (
        "max_tokens temp top_p min_p top_k xtc_probability xtc_threshold seed "
        "repetition_penalty repetition_context_size presence_penalty "
        "frequency_penalty logit_bias stop prefill_step_size kv_bits draft_sampling "
        "confidence_threshold"
    )
    return (
        {name: options[name] for name in same.split()}
        | _kv_options(options)
        | {
            "prompt": prompt,
            "template_options": template,
            "num_draft_tokens": width,
            "extra_eos_token_ids": [
                _token_id(tokenizer, token) for token in options["extra_eos_token"]
            ],
        }
    )


def _kv_options(options: dict[str, Any]) -> dict[str, int]:
    """What refines --kv-bits, where it is given."""
    names = ("kv_group_size", "quantized_kv_start")
    given = {name: options[name] for name in names if options[name] is not None}
    if given and options["kv_bits"] is None:
        flag = next(iter(given)).replace("_", "-")
        raise DFlash2Error(f"--{flag} needs --kv-bits")
    return given


def _token_id(tokenizer, token: str) -> int:
    """A token given as its number or its text, in mlx-lm's order."""
    if token.isdecimal() and int(token) < len(tokenizer):
        return int(token)
    vocabulary = tokenizer.get_vocab()
    if token in vocabulary:
        return vocabulary[token]
    raise DFlash2Error(
        f"--extra-eos-token {token!r} is neither a token of this model nor its number"
    )


class _Run:
    """One generation of the command line and what is printed about it."""

    def __init__(self, options, target, drafter, tokenizer, arguments):
        from ..generation import stream_generate

        self.options, self.target, self.drafter = options, target, drafter
        self.tokenizer, self.arguments = tokenizer, arguments
        if drafter is None:
            arguments["num_draft_tokens"] = None
        if options["verbose"]:
            self._describe()
        self.progress = _Progress(options["prefill_step_size"])
        self.stream_ = stream_generate(
            target,
            drafter,
            tokenizer,
            prompt_progress_callback=self.progress,
            **arguments,
        )

    @property
    def generation(self):
        return self.stream_.generation

    def stream(self) -> bool:
        """Print the text as it is decided; whether Ctrl-C ended it."""
        quiet, shown = self.options["as_json"], 0
        interrupted = False
        with contextlib.suppress(AttributeError):  # a captured stdout may lack it
            sys.stdout.reconfigure(errors="replace")
        try:
            for response in self.stream_:
                if not quiet and response.text:
                    click.echo(response.text, nl=False)
                    shown += len(response.text)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self.stream_.close()
            self.progress.close()
        if not quiet:
            click.echo(self.generation.text[shown:])
        return interrupted

    def compare(self):
        from ..generation import stream_generate
        from ..verify import compare

        arguments = self.arguments | {"num_draft_tokens": None}
        plain = stream_generate(self.target, None, self.tokenizer, **arguments)
        return compare(self.generation.tokens, plain)

    def as_dict(self, load_seconds, plain_reason, comparison) -> dict[str, Any]:
        import mlx.core as mx

        from ..cli import package_versions

        done = self.generation
        drafter = getattr(self.drafter, "source", None)
        drafts = self._drafts()
        result = {
            "text": done.text,
            "tokens": done.tokens,
            "finish_reason": done.finish_reason,
            "prompt_tokens": done.prompt_tokens,
            "engine": "plain" if plain_reason else "speculative",
            "engine_reason": plain_reason,
            "stats": done.stats.as_dict(),
            "timing": {
                "load_s": load_seconds,
                "prefill_s": done.prefill_seconds,
                "decode_s": done.decode_seconds,
                "tokens_per_second": done.tokens_per_second,
            },
            "peak_memory_bytes": mx.get_peak_memory(),
            "model": self.target.source.name,
            "draft_model": drafter.name if drafter else None,
            "draft_kind": self.drafter.config.kind if self.drafter else None,
            "block_size": drafts + 1,
            "num_draft_tokens": drafts,
            "revision": self.target.source.revision,
            "draft_revision": drafter.revision if drafter else None,
            "thinking": self._thinking(),
            "versions": package_versions(),
        }
        if comparison is not None:
            result["verify"] = comparison.as_dict()
        return result

    def footer(self, plain_reason, comparison) -> None:
        """Print the counts and timings to stderr."""
        import mlx.core as mx

        from ..text import repeats

        done, stats = self.generation, self.generation.stats
        rate = done.prompt_tokens / done.prefill_seconds if done.tokens else 0.0
        speed = done.tokens_per_second
        lines = [
            f"Prompt: {done.prompt_tokens} tokens, {rate:.1f} tokens/s, thinking: "
            f"{self._thinking()}",
            f"Generation: {len(done.tokens)} tokens"
            + (f", {speed:.1f} tokens/s" if speed else ""),
            f"Peak memory: {mx.get_peak_memory() / 1e9:.3f} GB",
        ]
        if plain_reason:
            lines.append(f"Engine: plain ({plain_reason})")
        else:
            lines.append(f"Engine: speculative, {self._acceptance(stats)}")
            if (
                stats.cycles >= ENOUGH_CYCLES
                and stats.drafted >= stats.cycles
                and stats.acceptance_length < LOW_ACCEPTANCE
            ):
                lines.append(
                    "This drafter accepts little here; compare the speed with --plain."
                )
        period = repeats(done.tokens)
        if period:
            lines.append(
                f"The text repeats itself every {period} tokens; a "
                "--repetition-penalty of 1.15 helps."
            )
        if comparison is not None:
            lines.append(f"Verify: {comparison}")
        click.echo("\n".join(lines), err=True)

    def _drafts(self) -> int:
        """Tokens drafted in a full cycle; its verify has one row more."""
        if self.drafter is None:
            return 0
        asked = self.arguments["num_draft_tokens"]
        return self.drafter.config.num_draft_tokens if asked is None else asked

    def _acceptance(self, stats) -> str:
        drafted = self._drafts()
        text = f"block size {drafted + 1} ({drafted} drafted)"
        if stats.acceptance_length is not None:
            text += (
                f", acceptance length {stats.acceptance_length:.3f} over "
                f"{stats.cycles} cycles"
            )
        if self.options["verbose"]:
            text += f", accepted per cycle {stats.accepted_per_cycle}"
        return text

    def _thinking(self) -> str:
        if isinstance(self.arguments["prompt"], str):
            return "no chat template"
        value = self.arguments["template_options"].get("enable_thinking")
        return "unset, the template decides" if value is None else json.dumps(value)

    def _describe(self) -> None:
        target = self.target
        lines = [
            f"Target: {target.source.name}, {target.num_layers} layers, hidden size "
            f"{target.hidden_size}, {str(target.dtype).removeprefix('mlx.core.')}"
        ]
        if self.drafter is not None:
            config = self.drafter.config
            told = "config.json" if config.explicit_first_row else "its family"
            lines.append(
                f"Drafter: {self.drafter.source.name}, {config.title}, "
                f"{config.num_hidden_layers} layers, block size "
                f"{config.num_draft_tokens + 1} ({config.num_draft_tokens} drafted), "
                f"row {config.first_row} is the first to predict (says {told}), "
                f"taps {list(config.target_layer_ids)}, mask token "
                f"{config.mask_token_id}, rope base {config.rope_theta:g}, computes in "
                f"{str(self.drafter.dtype).removeprefix('mlx.core.')}"
            )
        click.echo("\n".join(lines), err=True)


class _Progress:
    """A bar on stderr for prompts of more than one prefill step."""

    def __init__(self, step: int):
        self._step, self._bar = step, None

    def __call__(self, done: int, total: int) -> None:
        if total <= self._step:
            return
        if self._bar is None:
            self._bar = click.progressbar(length=total, label="Prompt", file=sys.stderr)
            self._bar.render_progress()
        self._bar.update(done - self._bar.pos)
        if done == total:
            self.close()

    def close(self) -> None:
        """End the line and show the cursor again, also after Ctrl-C."""
        if self._bar is not None:
            self._bar.render_finish()
            self._bar = None
