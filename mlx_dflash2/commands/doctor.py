"""`mlx-dflash2 doctor`: the machine, then the pair and how it is read."""

import json
import platform
from dataclasses import asdict
from typing import Any

import click

from ..errors import DFlash2Error
from .drafters import load_named_drafter, name_drafter

HEALTHY, DOUBTFUL = 0, 1  # a pair that cannot run is an error, which ends with 2
WEAK = 0.5  # accepted tokens a block; below, drafting seldom pays for itself
EXPENSIVE = 2.0  # forwards of one row that the widest verify may cost
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train leaves at 9:40 and arrives at 13:05. How long was the journey?",
    "Explain in a few sentences why the sea is salty.",
    "请用三句话介绍一下杭州的西湖。",
)


def run_doctor(options: dict[str, Any]) -> int:
    """Examine, print, and return the exit code."""
    as_json = options.pop("as_json")
    machine = examine_machine()
    if not as_json:
        click.echo("\n".join(_machine_lines(machine)))
    try:
        pair = examine_pair(options, machine)
    except DFlash2Error as error:
        if as_json:
            click.echo(json.dumps({"machine": machine, "error": str(error)}))
        raise
    doubts = _machine_doubts(machine) + pair["doubts"]
    report = {"machine": machine, "pair": pair, "doubts": doubts}
    if as_json:
        click.echo(json.dumps(report))
    else:
        click.echo("\n".join(_pair_lines(pair)))
        click.echo("\n".join(["Doubts:", *doubts] if doubts else ["Healthy."]))
    return DOUBTFUL if doubts else HEALTHY


def examine_machine() -> dict[str, Any]:
    """Versions, device, memory, and the dtypes that compute what they should."""
    import mlx.core as mx

    from ..cli import package_versions
    from ..health import available_memory, blas_library, check_types

    return {
        "versions": package_versions(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(mx.default_device()),
        "memory_available": available_memory(),
        "blas": blas_library(),
        "types": [asdict(check) for check in check_types()],
    }


def examine_pair(options: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """Load the pair, say what was read from where, and probe the reading.

    Raises:
        DFlash2Error: The pair cannot run.
    """
    from ..health import needed_memory, row_costs
    from ..loading import load_target
    from ..probe import diagnose
    from ..sources import find_drafter, find_target
    from ..text import encode_prompt

    name_drafter(options)
    offline = options["offline"]
    folders = [
        find(name, revision=revision, offline=offline).folder
        for find, name, revision in (
            (find_target, options["model"], options["revision"]),
            (find_drafter, options["draft_model"], options["draft_revision"]),
        )
    ]
    needed = needed_memory(*folders)
    short = _memory_doubts(needed, machine["memory_available"])
    if short:
        click.echo(f"Warning: {short[0]}", err=True)
    target, tokenizer = load_target(
        options["model"], revision=options["revision"], offline=options["offline"]
    )
    drafter = load_named_drafter(options, target)
    prompts = [
        encode_prompt(
            tokenizer,
            [{"role": "user", "content": text}]
            if tokenizer.has_chat_template
            else text,
        )
        for text in PROMPTS
    ]
    diagnosis = diagnose(target, drafter, prompts)
    return {
        "model": target.source.name,
        "revision": target.source.revision,
        "draft_model": drafter.source.name,
        "draft_revision": drafter.source.revision,
        "draft_folder": str(drafter.source.folder),
        "reading": _reading(drafter),
        "memory_needed": needed,
        "forward_ms": row_costs(target, prompts[0]),
        "accepted_per_block": diagnosis.configured.mean,
        "near_misses": [
            {
                "field": score.reading.field,
                "value": score.reading.value,
                "accepted_per_block": score.mean,
            }
            for score in diagnosis.others
        ],
        "doubts": short + _pair_doubts(diagnosis),
    }


def _reading(drafter) -> dict[str, Any]:
    """The settings that decide what is drafted."""
    config = drafter.config
    causal = [config.layer_is_causal(i) for i in range(config.num_hidden_layers)]
    return {
        "family": config.title,
        "target_layer_ids": list(config.target_layer_ids),
        "logits_start": config.first_row,
        "logits_start_given": config.explicit_first_row,
        "block_rows": config.block_size,
        "num_draft_tokens": config.num_draft_tokens,
        "mask_token_id": config.mask_token_id,
        "rope_theta": config.rope_theta,
        "rope_layout": "interleaved" if config.rope_interleaved else "halves",
        "rope_scaling": config.rope_scaling,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "causal_layers": causal,
        "dtype": str(drafter.dtype).removeprefix("mlx.core."),
        "read_from": list(config.read_from),
        "quantization": config.quantization,
    }


def _machine_doubts(machine: dict[str, Any]) -> list[str]:
    return [
        f"{check['dtype']} matrix products are wrong on this machine"
        for check in machine["types"]
        if not check["works"]
    ]


def _memory_doubts(needed: int, free: int | None) -> list[str]:
    if free is None or needed <= 0.9 * free:
        return []
    return [
        f"weights and caches take {needed / 1e9:.1f} GB of the {free / 1e9:.1f} GB "
        "that are free"
    ]


def _pair_doubts(diagnosis) -> list[str]:
    configured, better, doubts = diagnosis.configured, diagnosis.better, []
    if better is not None and better.mean >= WEAK:
        field = better.reading.field
        cause = "the stored type loses" if field == "dtype" else "config.json is wrong"
        doubts.append(
            f"{field} {better.reading.value} accepts {better.mean:.2f} tokens a block, "
            f"the configured reading {configured.mean:.2f}: probably {cause} there, or "
            "in a setting that is not tried here, such as mask_token_id"
        )
    elif configured.mean < WEAK:
        doubts.append(
            f"the drafter accepts {configured.mean:.2f} tokens a block, and no reading "
            "tried does well: it is weak, hardly trained, or for another target"
        )
    return doubts


def _machine_lines(machine: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items())
    free = machine["memory_available"]
    lines = [
        versions,
        f"{machine['system']}, device {machine['device']}, memory for models: "
        + (f"{free / 1e9:.1f} GB" if free else "unknown")
        + (f", BLAS {machine['blas']}" if machine["blas"] else ""),
    ]
    for check in machine["types"]:
        if check["error"] is None:
            lines.append(f"{check['dtype']}: not available")
        else:
            lines.append(
                f"{check['dtype']}: {check['seconds'] * 1e6:.0f} us for 5 rows of 512, "
                f"relative error {check['error']:.1e}"
            )
    return lines


def _pair_lines(pair: dict[str, Any]) -> list[str]:
    lines = [f"Target: {pair['model']}", f"Drafter: {pair['draft_model']}"]
    for name, value in pair["reading"].items():
        lines.append(f"  {name}: {json.dumps(value)}")
    lines[2:2] = [f"  read from {pair['draft_folder']}/config.json:"]
    lines.append(f"Memory: {pair['memory_needed'] / 1e9:.2f} GB for weights and caches")
    lines += _cost_lines(pair["forward_ms"])
    lines.append(f"Accepted per block as configured: {pair['accepted_per_block']:.3f}")
    for miss in pair["near_misses"]:
        lines.append(
            f"  with {miss['field']} {miss['value']}: {miss['accepted_per_block']:.3f}"
        )
    return lines


def _cost_lines(milliseconds: list[float]) -> list[str]:
    """What a verify of several rows costs, which is no doubt: times waver."""
    relative = [taken / milliseconds[0] for taken in milliseconds]
    rows, most = len(relative), relative[-1]
    lines = [
        f"Target forward of 1 to {rows} rows, in forwards of one row: "
        + " ".join(f"{cost:.2f}" for cost in relative)
    ]
    if most > EXPENSIVE:
        lines.append(
            f"  Verify is expensive here: {rows} rows cost {most:.1f} plain steps, "
            "which a cycle's tokens must earn; fewer may do better (--num-draft-tokens)"
        )
    return lines
