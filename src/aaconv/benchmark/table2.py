"""`aaconv bench table2`: the two latency columns of the paper's table 2, measured. `aaconv table 2` shows them.

The table takes the figures from CUDA graphs where there are any: kernels, not Python.
"""

from typing import Any

from ..recipes.paper import TABLE_2
from ..utils.device import pick_device
from ..utils.json_file import read_json
from .model import Network, default_batch, measure, print_rows
from .output import Results
from .switches import restoring_switches

PHASES = ["infer", "train"]


class Latencies(Results):
    """One record per model, as `aaconv table` reads them; a model that is not measured in both phases is left out."""

    kept: dict[str, dict[str, Any]] = {}
    """Records of an earlier run, by network; they go before those of this one."""

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
        new = [record | {"environment": self.head["environment"], **self.head["settings"]} for record in complete]
        return [*self.kept.values(), *(record for record in new if _name(record) not in self.kept)]

    def keep(self, path: str) -> None:
        """Take over what the file holds; it must have been measured as this run measures."""
        ours = {"device": self.head["environment"]["device"], **self.head["settings"]}
        try:
            records = {_name(record): record for record in read_json(path)}
            found = [{key: (record | record["environment"])[key] for key in ours} for record in records.values()]
        except FileNotFoundError:
            raise ValueError(f"there is no {path} to complete: drop --complete") from None
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path} is not what `aaconv bench table2` writes: drop --complete to replace it"
            ) from None
        for theirs in found:
            if theirs != ours:
                raise ValueError(f"{path} was measured with {theirs}, not {ours}: drop --complete to replace it")
        self.kept = records


def _name(record: dict[str, Any]) -> str:
    return str(Network(record["model"], record["options"]))


@restoring_switches()
def run(
    *,
    batch: int | None = None,
    size: int = 224,
    compiled: bool = True,
    device: str | None = None,
    rounds: int | None = None,
    json_to: str | None = None,
    complete: bool = False,
) -> None:
    """Measure the six networks of table 2 and print a table; to `complete` a file, those that it lacks and the first,
    which every run compares with."""
    if complete and json_to in (None, "-"):
        raise ValueError("--complete needs --json FILE, the file to complete")
    where = pick_device(device, needs_gpu="bench table2")
    networks = [Network(row.model, row.options) for row in TABLE_2]
    batch = batch or default_batch(where)
    settings: dict[str, Any] = {"batch": batch, "size": size, "compiled": compiled}
    results = Latencies("table2", where, json_to, **settings)
    if complete and json_to is not None:
        results.keep(json_to)
        networks = networks[:1] + [network for network in networks[1:] if str(network) not in results.kept]
    for rows in measure(networks, PHASES, batch, size, compiled, where, rounds):
        results.replace(rows)
    print_rows(results, where, **settings)
