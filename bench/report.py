"""A saved bench as its readers see it: the record without prompts, and the results."""

from dataclasses import dataclass

from .record import Arm, Environment, ModelFacts, Settings, WorkloadFacts
from .results import Results, Table
from .verdict import mode_name

SUMMARY_FORMAT = "mlx-dflash2 bench summary"


@dataclass(frozen=True)
class Report:
    """What tables, plots and result files are made of. See `record.Record`."""

    environment: Environment
    settings: Settings
    workload: WorkloadFacts
    targets: list[ModelFacts]
    drafters: list[ModelFacts]
    arms: list[Arm]
    partial: bool
    results: Results

    def name(self, table: Table) -> str:
        """Of the arm, and of the thinking mode if one was asked for."""
        return self.arms[table.arm].label + mode_name(table.thinking)
