"""A run from its first step, or from a checkpoint, to its end."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

import click
import torch

from .checkpoints import Store
from .contract import Contract, Progress
from .feed import Feed, Part
from .interruption import Interruption
from .learner import Learner, StepReport
from .metrics import Evaluator, losses, rates
from .setup import Setup

METRICS = "metrics.jsonl"


@dataclass
class Run:
    """A run under way.

    Attributes:
        progress: Of what was done; grows from step to step.
    """

    setup: Setup
    contract: Contract
    learner: Learner
    evaluator: Evaluator
    store: Store
    progress: Progress

    def go(self, interruption: Interruption) -> None:
        """Train to the end, to the limit of time, or to an interruption."""
        config, world = self.setup.config, self.setup.world
        slots = self.setup.geometry.num_draft_tokens
        feed = Feed(config, world, self.setup.rows, self.setup.anneal, slots)
        began = last = time.monotonic()
        with self._bar() as show, self._log() as log:
            for parts in feed.steps(self.progress.step):
                report = self._step(parts)
                now = time.monotonic()
                over = config.minutes and now - began >= 60 * config.minutes
                self.progress = self.progress.after(seconds=now - last)
                last = now
                stops = self._agree(bool(over) or interruption.number is not None)
                line = self._line(report)
                self._finish_step(line, log, stops)
                show(line["loss"])
                if stops:
                    break

    def summary(self) -> str:
        """How far it came, in one line."""
        progress, steps = self.progress, self.setup.config.steps
        best = progress.best and f", best acceptance length {progress.best[0]:.3f}"
        skipped = f", {progress.skipped} skipped" if progress.skipped else ""
        return (
            f"step {progress.step} of {steps}{skipped}, {progress.blocks} blocks, "
            f"{progress.seconds:.0f} s{best or ''}"
        )

    def _step(self, parts: list[Part]) -> StepReport:
        before = self.progress
        taken = before.step - before.skipped
        report = self.learner.step(parts, before.step, taken)
        counts = torch.tensor(
            [
                sum(int(part.blocks.real.sum()) for part in parts),
                sum(int((part.batch.document >= 0).sum()) for part in parts),
            ],
            device=self.setup.world.device,
        )
        blocks, tokens = self.setup.world.totals([counts])[0].tolist()
        self.progress = before.after(
            step=1,
            skipped=int(report.skipped),
            blocks=blocks,
            tokens=tokens,
            slots=int(report.report.counts["valid"].sum()),
        )
        return report

    def _finish_step(
        self, line: dict[str, Any], log: TextIO | None, stops: bool
    ) -> None:
        """Evaluate, log and save what is due."""
        config, step = self.setup.config, self.progress.step
        ends = step == config.steps
        every = 0 if stops else config.evaluation.every
        better = False
        if ends or (every and step % every == 0):
            evaluation = self.evaluator(self.setup.held_out)
            found, loss = evaluation["acceptance_length"], evaluation["loss"]
            best = self.progress.best
            better = not best or (found, -loss) > (best[0], -best[1])
            self.progress = replace(
                self.progress,
                best=(found, loss) if better else best,
                evaluation=evaluation | {"step": step},
            )
            line["evaluation"] = evaluation
            self._say(f"step {step}: held-out acceptance length {found:.3f}")
        if log is not None:
            log.write(json.dumps(line) + "\n")
            log.flush()
        if stops or ends or better or step % config.checkpoints.every == 0:
            self._save(better)

    def _say(self, text: str) -> None:
        if self.setup.world.leads:
            click.echo(text, err=True)

    def _line(self, report: StepReport) -> dict[str, Any]:
        objective = self.setup.config.objective_at(self.progress.step - 1)
        return {
            "step": self.progress.step,
            **losses(report.report, objective),
            **rates(report.report),
            "rate": report.rate,
            "norm": report.norm if report.norm < float("inf") else None,
            "scale": report.scale,
            "skipped": self.progress.skipped,
            "blocks": self.progress.blocks,
            "slots": self.progress.slots,
            "seconds": round(self.progress.seconds, 3),
        }

    def _save(self, best: bool) -> None:
        if self.setup.world.leads:
            self.store.save(
                self.learner.drafter,
                self.learner.optimizer,
                self.learner.scaler,
                progress=self.progress,
                contract=self.contract,
                config=asdict(self.setup.config),
                best=best,
            )
        self.setup.world.wait()

    def _agree(self, stops: bool) -> bool:
        """Whether any process has to stop: then all do, after the same step."""
        flag = torch.tensor([float(stops)], device=self.setup.world.device)
        return bool(self.setup.world.totals([flag])[0])

    @contextmanager
    def _log(self) -> Iterator[TextIO | None]:
        """The metrics, without lines of steps after the checkpoint gone on from."""
        if not self.setup.world.leads:
            yield None
            return
        path = self.store.folder.parent / METRICS
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if len(lines) > self.progress.step:
            partial = path.with_name(f".{path.name}.partial")
            kept = lines[: self.progress.step]
            partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            partial.rename(path)
        with path.open("a", encoding="utf-8") as log:
            yield log

    @contextmanager
    def _bar(self) -> Iterator[Callable[[float], None]]:
        """A progress bar on stderr, where that is a terminal."""
        if not (self.setup.world.leads and sys.stderr.isatty()):
            yield lambda loss: None
            return
        with click.progressbar(
            length=self.setup.config.steps,
            label="training",
            file=sys.stderr,
        ) as bar:
            bar.update(self.progress.step)

            def show(loss: float) -> None:
                best = self.progress.best and f", best {self.progress.best[0]:.3f}"
                bar.label = f"loss {loss:.3f}{best or ''}"
                bar.update(1)

            yield show
