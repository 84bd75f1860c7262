"""`aaconv bench table2`: the two latency columns of the paper's table 2, measured. `aaconv table 2` shows them.

The table takes the figures from CUDA graphs where there are any: kernels, not Python.
"""

from typing import Any

from ..paper import TABLE_2
from .measure import pick_device
from .model import Network, default_batch, measure, print_rows
from .report import Results

PHASES = ["infer", "train"]


class Latencies(Results):
    """One record a model, as `aaconv table` reads them; a model that is not measured in both phases is left out."""

    def content(self) -> list[dict[str, Any]]:
        models: dict[str, dict[str, Any]] = {}
        # One way for all, that of the first model: a launched time against one from a graph would say nothing.
        way = "graph_ms" if self.rows and "graph_ms" in self.rows[0] else "launched_ms"
        for row in self.rows:
            network = Network(row["model"], row["options"])
            record = models.setdefault(str(network), {"model": network.name, "options": network.options})
            if way in row:
                record[f"{row['phase']}_ms"] = row[way]["p50"]
                record[row["phase"]] = {key: row[key] for key in row if key not in ("model", "options", "phase")}
        complete = [record for record in models.values() if all(f"{phase}_ms" in record for phase in PHASES)]
        return [record | {"environment": self.head["environment"], **self.head["settings"]} for record in complete]


def run(
    *,
    batch: int | None = None,
    size: int = 224,
    compiled: bool = True,
    device: str | None = None,
    rounds: int | None = None,
    json_to: str | None = None,
) -> None:
    """Measure the six networks of table 2 and print a table."""
    where = pick_device(device, needs_gpu="bench table2")
    networks = [Network(row.model, row.options) for row in TABLE_2]
    batch = batch or default_batch(where)
    settings = {"batch": batch, "size": size, "compiled": compiled}
    results = Latencies("table2", where, json_to, **settings)
    for rows in measure(networks, PHASES, batch, size, compiled, where, rounds):
        results.replace(rows)
    print_rows(results, where, **settings)
