"""The model card of an exported drafter."""

from collections.abc import Mapping
from typing import Any

from mlx_dflash2.config import DrafterConfig

from .checkpoints import Saved

TITLES = {
    "plain_tok_s": "plain tok/s",
    "spec_tok_s": "spec tok/s",
    "speedup": "speedup",
    "projected": "projected",
    "acceptance_length": "acceptance length",
    "identical": "greedy-identical",
}


def model_card(
    saved: Saved,
    config: DrafterConfig,
    measured: Mapping[str, Any] | None,
    *,
    averaged: int,
) -> str:
    """README.md: what it is, how it was trained, what it does, how to use it.

    Args:
        saved: The checkpoint.
        config: Of the drafter.
        measured: measured_results.json of a bench; None where nothing was measured.
        averaged: Checkpoints whose mean the weights are; the last one is `saved`.
    """
    return "\n\n".join(
        [
            _front_matter(saved),
            f"# {config.title} drafter for {saved.contract['target']['name']}",
            "A drafter for lossless speculative decoding: it proposes tokens, the "
            "target keeps those it would have written itself.",
            _shape(config),
            _training(saved),
            _evaluation(saved, averaged),
            _bench(measured),
            _use(saved),
            "What the training text is made of, and what its terms ask, is in "
            "SOURCE_TERMS.md.\n",
        ]
    )


def _front_matter(saved: Saved) -> str:
    parent = saved.contract["parent"] or {}
    licence = f"license: {parent['licence']}\n" if parent.get("licence") else ""
    base = saved.contract["target"]["name"]
    tags = "tags:\n- speculative-decoding\n- dflash"
    return f"---\n{licence}base_model: {base}\n{tags}\n---"


def _shape(config: DrafterConfig) -> str:
    return (
        f"- {config.num_hidden_layers} layers, hidden size {config.hidden_size}\n"
        f"- taps {list(config.target_layer_ids)} of {config.num_target_layers} layers\n"
        f"- {config.num_draft_tokens} drafted tokens a cycle, mask token "
        f"{config.mask_token_id}\n"
        "- embedding and head are the target's"
    )


def _training(saved: Saved) -> str:
    progress, config = saved.progress, saved.config
    terms = ", ".join(
        f"{value:g} {name}"
        for name, value in config["objective"].items()
        if isinstance(value, float) and value and name not in ("gamma", "alpha")
    )
    parent = saved.contract["parent"]
    rows = saved.contract["data"]["rows"]
    batch = config["batch"]
    lines = [
        f"- {progress.step} steps of {batch['rows']} rows, up to {batch['anchors']} "
        f"blocks a row: {progress.blocks} blocks, {progress.slots} labels, "
        f"{progress.seconds / 3600:.2f} h in {saved.contract['settings']['precision']}",
        f"- loss: {terms}; slots weighed by {config['objective']['weighting']}",
        f"- data: {rows['rows']} rows of {rows['tokens']} tokens, "
        f"{rows['supervised']} to learn, sha256 {rows['sha256'][:16]}",
    ]
    if parent:
        at = f"@{parent['revision']}" if parent["revision"] else ""
        licence = parent["licence"] or "not stated"
        lines.append(f"- started from {parent['parent']}{at} (licence: {licence})")
    return "## Training\n\n" + "\n".join(lines)


def _evaluation(saved: Saved, averaged: int) -> str:
    found = saved.progress.evaluation
    if not found:
        return "## Held-out rows\n\nNot evaluated."
    text = (
        f"## Held-out rows\n\nAcceptance length {found['acceptance_length']:.3f} over "
        f"{found['cycles']} cycles, evaluated after step {found['step']}."
    )
    if averaged > 1:
        text += (
            f" The weights are the mean of {averaged} checkpoints, which was not "
            "evaluated here."
        )
    return text


def _bench(measured: Mapping[str, Any] | None) -> str:
    if measured is None:
        return "## Bench\n\nNot benched yet: run `mlx-dflash2 bench`."
    groups = dict(measured["domains"]) | {"overall": measured["overall"]}
    names = [name for name in TITLES if any(name in g for g in groups.values())]
    lines = [
        f"| domain | {' | '.join(TITLES[name] for name in names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    for domain, numbers in groups.items():
        cells = " | ".join(_cell(numbers.get(name)) for name in names)
        lines.append(f"| {domain} | {cells} |")
    return "## Bench\n\n" + "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _use(saved: Saved) -> str:
    target = saved.contract["target"]["name"]
    return (
        "## Use\n\n```\n"
        f'mlx-dflash2 generate --model {target} --draft-model FOLDER -p "..."\n```'
    )
