"""`mlx-dflash2 bench`: measure pairs; render, compare and write reports."""

import sys
from pathlib import Path
from typing import Any

import click

from ..errors import DFlash2Error
from ..text import check_text
from .drafters import name_drafter

SAMPLES = 200  # runs of --sampled with and without the drafter
MODES = {None: "as the template has it", True: "on", False: "off"}
OUTPUTS = ("json_file", "markdown", "plot", "measured_results", "summary")


def run_bench(options: dict[str, Any]) -> int:
    """Measure, print, write; the exit code."""
    from mlx_dflash2.bench.environment import describe_machine
    from mlx_dflash2.bench.outputs import report_of
    from mlx_dflash2.bench.record import Record
    from mlx_dflash2.bench.run import Bench

    _refuse_bytes(options)
    outputs = _outputs(options, begun=options["resume"])
    _refuse_several_results(options)
    before = _measured_before(options)
    plan, workload = _plan(options)
    engine = _load(options)
    record = _new_record(options, plan, workload, engine, describe_machine())
    if before is not None:
        record = _continued(before, record, plan)
    progress = Progress(len(plan.jobs), len(record.prompts))

    def save(grown: Record) -> None:
        outputs.save(grown)
        progress.reach(len(grown.prompts))

    bench = Bench(engine, plan, record, save=save, tell=progress.begin)
    interrupted = False
    try:
        bench.run()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        progress.close()
    if interrupted and not bench.record.prompts:
        return 130
    code = outputs.write(report_of(bench.record))
    if interrupted:
        _say_how_to_resume(options)
    return 130 if interrupted else code


def run_report(options: dict[str, Any]) -> int:
    """Render a saved report again; the exit code."""
    from mlx_dflash2.bench.compare import read_report

    file = options.pop("file")
    outputs = _outputs({"json_file": None, **options})
    return outputs.write(read_report(file))


def run_compare(first: str, second: str) -> int:
    """Print two reports of one workload side by side; the exit code."""
    from mlx_dflash2.bench.compare import compare, read_report

    click.echo(compare(read_report(first), read_report(second)))
    return 0


def _refuse_bytes(options: dict[str, Any]) -> None:
    """Names that are no text could not be written into a report."""
    for name, value in options.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                check_text(text, f"--{name.replace('_', '-')}")


def _outputs(options: dict[str, Any], *, begun: bool = False):
    from mlx_dflash2.bench.outputs import Outputs
    from mlx_dflash2.bench.release import parse_gate

    names = {name: options[name] for name in OUTPUTS}
    gates = [parse_gate(text) for text in options["gate"]]
    outputs = Outputs(**names, gates=gates, begun=begun)
    outputs.check()
    return outputs


def _measured_before(options: dict[str, Any]):
    """The record that --resume goes on with."""
    if not options["resume"]:
        return None
    from mlx_dflash2.bench.compare import read_record
    from mlx_dflash2.bench.files import STDOUT

    if options["json_file"] in (None, STDOUT):
        raise DFlash2Error("--resume goes on with a report: name it with --json FILE")
    return read_record(options["json_file"])


def _refuse_several_results(options: dict[str, Any]) -> None:
    several = [
        flag
        for flag, count in {
            "--model": len(options["model"]),
            "--draft-model": len(options["draft_model"]),
            "--block-size": len(options["block_size"] or (0,)),
            "--thinking": 2 if options["thinking"] == "both" else 1,
        }.items()
        if count > 1
    ]
    if options["measured_results"] and several:
        raise DFlash2Error(
            "--measured-results describes one drafter at one width in one mode; give "
            f"{several[0]} one value"
        )


def _plan(options: dict[str, Any]):
    """What is measured, and the workload it is."""
    from mlx_dflash2.bench.run import Plan
    from mlx_dflash2.bench.workload import built_in, from_file

    if options["temp"] is not None and not options["sampled"]:
        raise DFlash2Error("--temp is the temperature of --sampled; give both")
    if options["samples"] is not None and not options["sampled"]:
        raise DFlash2Error("--samples counts the runs of --sampled; give both")
    if options["data"] is None and options["group_by"] is not None:
        raise DFlash2Error("--group-by names a field of the lines of --data; give both")
    chosen = {
        "domains": options["domain"] or None,
        "per_domain": options["prompts_per_domain"],
    }
    if options["data"] is None:
        workload = built_in(**chosen)
    else:
        data = Path(options["data"])
        workload = from_file(data, group_by=options["group_by"], **chosen)
    plan = Plan(
        workload.prompts,
        modes=_modes(options),
        template=not options["ignore_chat_template"],
        max_tokens=options["max_tokens"],
        repeats=options["repeats"],
        cost_repeats=options["cost_repeats"],
        samples=(options["samples"] or SAMPLES) if options["sampled"] else 0,
        temperature=1.0 if options["temp"] is None else options["temp"],
        seed=options["seed"],
    )
    return plan, workload


def _modes(options: dict[str, Any]) -> tuple[bool | None, ...]:
    """The thinking modes of the chat template that are measured."""
    both, one = options["thinking"] == "both", options["enable_thinking"]
    if both and one is not None:
        raise DFlash2Error("--thinking both measures both modes; leave the other out")
    if options["ignore_chat_template"] and (both or one is not None):
        raise DFlash2Error("thinking is set by the chat template that is ignored")
    return (True, False) if both else (one,)


def _load(options: dict[str, Any]):
    """The engine of the backend, its models loaded."""
    options["draft_model"] = _named_drafters(options)
    names = options["model"], options["draft_model"]
    shared = {
        "revisions": _one_each(options, "revision", "model"),
        "draft_revisions": _one_each(options, "draft_revision", "draft_model"),
        "offline": options["offline"],
        "draft_kind": options["draft_kind"],
    }
    if options["backend"] == "torch":
        if options["draft_bits"]:
            raise DFlash2Error("--draft-bits is MLX's; leave --backend torch out")
        return _load_torch(options, names, shared)
    for name in ("device", "dtype"):
        if options[name] is not None:
            raise DFlash2Error(f"--{name} is for --backend torch; give both")
    from mlx_dflash2.bench.mlx_engine import load_mlx

    bits = int(options["draft_bits"]) if options["draft_bits"] else None
    return load_mlx(*names, **shared, draft_bits=bits)


def _load_torch(options: dict[str, Any], names: tuple, shared: dict[str, Any]):
    try:
        import torch
    except ImportError:
        raise DFlash2Error(
            "--backend torch needs PyTorch, which is not installed; "
            "pip install 'mlx-dflash2[torch]'"
        ) from None
    from transformers.utils.logging import disable_progress_bar

    from mlx_dflash2.bench.torch_engine import load_torch

    disable_progress_bar()
    device = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    return load_torch(*names, **shared, device=device, dtype=options["dtype"])


def _one_each(options: dict[str, Any], name: str, of: str) -> list[str | None]:
    """A revision for every model; one that is given says which, if there is one."""
    if options[name] and len(options[of]) > 1:
        name, of = (part.replace("_", "-") for part in (name, of))
        raise DFlash2Error(f"--{name} is of one model; give --{of} once")
    return [options[name]] * len(options[of])


def _named_drafters(options: dict[str, Any]) -> tuple[str, ...]:
    """The drafters' names, `auto` replaced by the published one of the first target."""
    names = []
    for name in options["draft_model"]:
        one = options | {"model": options["model"][0], "draft_model": name}
        name_drafter(one)
        names.append(one["draft_model"])
    for kind, given in (("--model", options["model"]), ("--draft-model", names)):
        if len({_identity(name) for name in given}) < len(given):
            raise DFlash2Error(f"{kind} names the same twice: {', '.join(given)}")
    return tuple(names)


def _identity(name: str) -> str:
    """One spelling of a folder's name; a repository's as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def _arms(options: dict[str, Any], engine) -> list:
    """Every target plainly, and with every drafter at every width."""
    from mlx_dflash2.bench.record import Arm

    arms = []
    targets, drafters = _short_names(engine.targets), _short_names(engine.drafters)
    for target, target_name in enumerate(targets):
        suffix = f" on {target_name}" if len(targets) > 1 else ""
        arms.append(Arm(f"plain{suffix}", target))
        for drafter, drafter_name in enumerate(drafters):
            trained = engine.drafters[drafter].num_draft_tokens
            for block in options["block_size"] or (trained + 1,):
                if block > trained + 1:
                    raise DFlash2Error(
                        f"--block-size {block}: {drafter_name} was trained for blocks "
                        f"of {trained + 1}, use 2 to {trained + 1}"
                    )
                width = f", block {block}" if options["block_size"] else ""
                label = f"{drafter_name}{width}{suffix}"
                arms.append(Arm(label, target, drafter, block - 1))
    return arms


def _short_names(models: list) -> list[str]:
    """The last part of each name, or the whole where that is not unique."""
    short = [Path(facts.name).name or facts.name for facts in models]
    return [
        name if short.count(name) == 1 else facts.name
        for name, facts in zip(short, models, strict=True)
    ]


def _new_record(options: dict[str, Any], plan, workload, engine, environment):
    from mlx_dflash2.bench.record import Record

    return Record(
        environment=environment | engine.environment(),
        settings=_settings(options, plan),
        workload=workload.as_dict(),
        targets=engine.targets,
        drafters=engine.drafters,
        arms=_arms(options, engine),
    )


def _settings(options: dict[str, Any], plan) -> dict[str, Any]:
    """What decides the numbers, beside workload, models and machine."""
    return {
        "max_tokens": plan.max_tokens,
        "prompts_per_domain": options["prompts_per_domain"],
        "thinking": "both" if len(plan.modes) > 1 else MODES[plan.modes[0]],
        "template": plan.template,
        "repeats": plan.repeats,
        "cost_repeats": plan.cost_repeats,
        "samples": plan.samples,
        "temperature": plan.temperature,
        "seed": plan.seed,
    }


def _continued(before, new, plan):
    """The record to go on with, if it is of the same bench on the same machine."""
    for part in ("settings", "workload", "targets", "drafters", "arms"):
        if getattr(before, part) != getattr(new, part):
            raise DFlash2Error(
                f"--resume: the report was measured with other {part}; give the same "
                "command, or another --json FILE"
            )
    here, there = ({**r.environment, "date": None} for r in (new, before))
    changed = [name for name in here if here[name] != there.get(name)]
    if changed:
        raise DFlash2Error(
            f"--resume: the report was measured elsewhere ({', '.join(changed)} "
            "differ); its speeds do not mix with this machine's"
        )
    asked = {(prompt.name, mode, prompt.sha256) for prompt, mode in plan.jobs}
    for prompt in before.prompts:
        if (prompt.name, prompt.thinking, prompt.sha256) not in asked:
            raise DFlash2Error(
                f"--resume: the report holds {prompt.name}, which is not one of the "
                "prompts asked for; start with another --json FILE"
            )
    return before


class Progress:
    """A bar on stderr, a step for every prompt."""

    def __init__(self, total: int, done: int):
        self._bar = click.progressbar(
            length=total, label="Bench", file=sys.stderr, item_show_func=str
        )
        self._bar.update(done)

    def begin(self, what: str) -> None:
        """Show what is measured next."""
        self._bar.current_item = what
        self._bar.render_progress()

    def reach(self, done: int) -> None:
        self._bar.update(done - self._bar.pos)

    def close(self) -> None:
        """End the line and show the cursor again, also after Ctrl-C."""
        self._bar.render_finish()


def _say_how_to_resume(options: dict[str, Any]) -> None:
    file = options["json_file"]
    if file in (None, "-"):
        click.echo("Interrupted; what is above is partial.", err=True)
    else:
        click.echo(
            f"Interrupted; {file} is partial, the same command with --resume goes on.",
            err=True,
        )
