"""The tables of models.md and recipes.md, as `aaconv models` and `aaconv recipes` know them."""

from collections.abc import Iterable, Sequence

from aaconv import recipes
from aaconv.cost.known import cost_of, known_models, pretrained
from aaconv.recipes.recipe import Recipe

FAMILIES = {
    "resnet": "ResNet",
    "wrn": "Wide-ResNet",
    "mnasnet": "MnasNet",
    "retinanet": "RetinaNet",
    "small": "The demo's network",
}


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Rows of cells as Markdown; the columns named in `right` are aligned there."""
    marks = ["---:" if title in right else "---" for title in head]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, marks, *rows))


def models_table() -> str:
    """Every model, family by family."""
    numbers = ("image", "parameters", "GFLOPs", "with products", "maps")
    return "\n\n".join(
        f"## {title}\n\n{markdown_table(('model', *numbers), map(_model, names), numbers)}"
        for title, names in ((title, _family(key)) for key, title in FAMILIES.items())
    )


def _family(key: str) -> list[str]:
    """Of the longest key that fits: retinanet_resnet50 is a RetinaNet."""
    return [name for name in known_models() if max((k for k in FAMILIES if k in name), key=len) == key]


def _model(name: str) -> tuple[str, ...]:
    with_weights = {key.partition(".")[0] for key in pretrained()}
    cost, mark = cost_of(name), " (has weights)" if name in with_weights else ""
    maps = f"{cost.map_bytes / 2**20:.2f} MiB" if cost.map_bytes else ""
    image = f"{cost.size[0]} x {cost.size[1]}"
    return f"`{name}`{mark}", image, f"{cost.params:,}", f"{cost.gflops:.3f}", f"{cost.true_gflops:.3f}", maps


def recipes_table() -> str:
    """Every recipe of the catalogue; `paper` is the first accuracy of its row."""
    head = ("recipe", "network", "data", "epochs", "batch", "paper's table", "paper")
    rows = (_recipe(recipes.get(name)) for name in recipes.names())
    return markdown_table(head, rows, ("epochs", "batch", "paper"))


def _recipe(recipe: Recipe) -> tuple[str, ...]:
    options = "".join(f", {option}={value}" for option, value in recipe.model.options.items())
    row, where = recipes.paper_row(recipe), recipe.evidence
    accuracy = "" if row is None else next((row.cells[name] for name in ("top-1", "mAP") if name in row.cells), "")
    evidence = "" if where is None else f"{where.table}, {where.row}"
    network = f"`{recipe.model.name}`{options}"
    return f"`{recipe.name}`", network, recipe.data, str(recipe.epochs), str(recipe.batch), evidence, accuracy
