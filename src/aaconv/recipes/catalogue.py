"""The recipes by name: the paper's experiments, made from the rows of its tables, and practical ones of our own.

A name is `<data>-<network>-<kind>`, with what is special about it behind: imagenet-resnet50-aa-ratio-0.5. What the
paper gives about its training is in the functions below, with what it leaves open and how we filled it in.
"""

from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from .paper import TABLES, PaperTable, Row
from .pretrained import AUGMENTED
from .recipe import Evidence, Model, Recipe

_RECIPES: dict[str, Recipe] = {}

ON_A_GPU: dict[str, Any] = {"precision": "bf16", "compile": "reduce-overhead"}
"""Our choice, as the paper gives none. CUDA graphs: a training step of AA-ResNet-50 takes 23.5 ms with them and 45.8
without on an H200, of AA-Wide-ResNet-28-10 42.4 and 44.5 (docs/benchmarks.md). On a CPU `for_machine` takes float32 and
no compilation instead."""


def register(*recipes: Recipe) -> None:
    """Add recipes to the catalogue; a name can be given once."""
    for recipe in recipes:
        if recipe.name in _RECIPES:
            raise ValueError(f"the recipe {recipe.name!r} is registered already")
        _RECIPES[recipe.name] = recipe


def names(pattern: str = "*") -> list[str]:
    """The names that fit a wildcard pattern, or of which it is a part.

    >>> names("demo-*")
    ['demo-plain', 'demo-se', 'demo-aa']
    """
    found = [name for name in _RECIPES if fnmatchcase(name, pattern) or pattern in name]
    if not found:
        raise ValueError(f"no recipe fits {pattern!r}{_nearest(pattern)}")
    return found


def get(name: str) -> Recipe:
    """The recipe of that name; a ValueError suggests the nearest if there is none.

    >>> recipe = get("cifar100-wrn28-10-aa")
    >>> recipe.model.name, recipe.epochs, recipe.batch
    ('aa_wrn28_10', 500, 256)
    """
    if name not in _RECIPES:
        raise ValueError(f"unknown recipe {name!r}{_nearest(name)}")
    return _RECIPES[name]


def paper_row(recipe: Recipe) -> Row | None:
    """The row of the paper's table that the recipe reproduces, with all its values as printed."""
    if recipe.evidence is None or recipe.evidence.table not in TABLES:
        return None
    rows = TABLES[recipe.evidence.table].rows
    return next((row for row in rows if row.name == recipe.evidence.row), None)


PARTIAL = ("holdout", "train_limit", "eval_limit")
"""Fields with which a result is no longer of all images, and must not stand beside the paper's."""


def paper_value(recipe: Recipe, column: str) -> float | None:
    """One number of that row: paper_value(recipe, "top-1"); none for a part of the images.

    >>> paper_value(get("cifar100-wrn28-10-aa"), "top-1")
    81.6
    """
    row = None if any(getattr(recipe, name) for name in PARTIAL) else paper_row(recipe)
    printed = None if row is None else row.cells.get(column)
    return None if printed in (None, "-") else float(printed.split()[0])


def _nearest(name: str) -> str:
    near = [known for known in _RECIPES if known.startswith(f"{name}-")][:3] or get_close_matches(name, _RECIPES, n=3)
    return f"; did you mean {', '.join(near)}?" if near else "; `aaconv recipes` lists them"


OURS = {
    "cifar100": ("precision", "compile"),
    "imagenet": ("batch", "precision", "compile"),
    "mnasnet": (
        *("batch", "lr_base", "momentum", "eps", "weight_decay", "label_smoothing", "ema", "warmup", "decay_epochs"),
        *("decay_rate", "precision", "compile"),
    ),
    "coco": (
        *("size", "batch", "lr_base", "lr_base_size", "momentum", "weight_decay", "clip_grad", "schedule", "warmup"),
        *("decay_epochs", "decay_rate", "precision", "compile"),
    ),
}
"""Family -> fields of the paper's experiments that its text does not give: the choice is ours."""


def ours(recipe: Recipe) -> tuple[str, ...]:
    """Fields of a paper's experiment whose values are our choice; of a recipe of our own: none is named."""
    if recipe.evidence is None:
        return ()
    return OURS.get("mnasnet" if "mnasnet" in recipe.model.name else recipe.data, ())


def cifar100(model: str) -> dict[str, Any]:
    """500 epochs of SGD, 0 to 0.2 B/256 in 5% of them, then cosine; smaller batch and more decay with attention."""
    augmented = model.startswith("aa_")
    return {
        "data": "cifar100",
        "epochs": 500,
        "batch": 256 if augmented else 1024,
        "weight_decay": 5e-4 if augmented else 2e-4,
        "lr_base": 0.2,
    }


def imagenet(model: str) -> dict[str, Any]:
    """100 epochs of SGD, 0 to 0.128 B/256 in 5% of them, a tenth at 30, 60, 80 and 90.

    The batch is "the largest of 32 to 256 per worker that fits", on 8 workers: 1024 is our choice, the rule scales.
    """
    return {
        "data": "imagenet",
        "size": 224,
        "epochs": 100,
        "batch": 1024,
        "lr_base": 0.128,
        "weight_decay": 1e-4,
        "schedule": "step",
        "decay_epochs": (30.0, 60.0, 80.0, 90.0),
        "workers": 16,
    }


MNASNET_EPOCHS, MNASNET_DECAY, MNASNET_DECAY_EPOCHS = 350, 0.97, 2.4


def mnasnet(model: str) -> dict[str, Any]:
    """350 epochs of RMSProp with exponential decay; with attention half the learning rate, ending at the same.

    The rest is the setup of the MnasNet paper it points to (0 to 0.016 B/256 in 5 epochs, times 0.97 every 2.4, decay
    and momentum 0.9, dropout 0.2, weight decay 1e-5) and the convention of its successors (epsilon 1e-3, smoothing 0.1,
    averaged weights).
    """
    augmented = model.startswith("aa_")
    decays = MNASNET_EPOCHS / MNASNET_DECAY_EPOCHS
    return {
        "data": "imagenet",
        "size": 224,
        "epochs": MNASNET_EPOCHS,
        "batch": 4096,
        "optimizer": "rmsproptf",
        "eps": 1e-3,
        "lr_base": 0.008 if augmented else 0.016,
        "schedule": "exponential",
        "warmup": 5 / MNASNET_EPOCHS,
        "decay_epochs": (MNASNET_DECAY_EPOCHS,),
        "decay_rate": round(MNASNET_DECAY * 2 ** (1 / decays), 6) if augmented else MNASNET_DECAY,
        "weight_decay": 1e-5,
        "label_smoothing": 0.1,
        "ema": 0.9999,
        "workers": 16,
    }


def _of_the_paper() -> Iterator[Recipe]:
    """One recipe per row of tables 1 to 4, 6 and 7 that no earlier one has; a table's own rows first (3 before 2)."""
    seen = set()
    for number in (1, 3, 2, 6, 7, 4):
        for row in TABLES[number].rows:
            for recipe in _of_row(TABLES[number], row):
                key = recipe.model.name, tuple(sorted(recipe.model.options.items()))
                if key not in seen:
                    seen.add(key)
                    yield recipe


def _of_row(table: PaperTable, row: Row) -> Iterator[Recipe]:
    kind, _, network = row.model.partition("_")
    family = mnasnet if network.startswith("mnasnet") else imagenet if table.dataset == "imagenet" else cifar100
    dropout = {"drop_rate": 0.2} if family is mnasnet else {}
    base = f"{table.dataset}-{network.replace('_', '-')}-{kind}"
    title = f"{row.name} of table {table.number}" + (
        "" if _names_network(row) else f", on {network.replace('resnet', 'ResNet-')}"
    )

    def make(suffix: str, options: dict[str, Any], summary: str) -> Recipe:
        return Recipe(
            name=base + suffix,
            summary=summary,
            model=Model(row.model, dropout | options),
            evidence=Evidence(table.number, row.name),
            **family(row.model) | ON_A_GPU,
        )

    if row.fitted:
        yield make("", dict(row.options), f"{title}, as the text says: relative tables shared by the heads")
        per_head = f"{title}, as its printed cost says: relative tables per head"
        yield make("-per-head", row.options | row.fitted, per_head)
    else:
        yield make(_suffix(row.options), dict(row.options), title)
    if row.start:
        suffix = "".join(f"-{name}-{value}" for name, value in row.start.items())
        yield make(suffix, row.options | row.start, f"{title}, begun as the paper's listing begins")


def _names_network(row: Row) -> bool:
    """Whether the name of the row says which network it is."""
    return "Net" in row.name


def _suffix(options: dict[str, Any]) -> str:
    if "value_ratio" in options:
        return f"-ratio-{options['value_ratio']}"
    position = options.get("position")
    return "" if position is None else "-no-position" if position == "none" else f"-{position}"


def _small() -> Iterator[Recipe]:
    """Wide-ResNet-16-4 on CIFAR-100: the comparison of table 1 in minutes on one GPU, all kinds trained alike."""
    variants: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": ("plain", {}),
        "ge": ("ge", {}),
        "se": ("se", {}),
        "aa": ("aa", {}),
        "aa-per-head": ("aa", {"share_heads": False}),
        "aa-no-position": ("aa", {"position": "none"}),
        "aa-init-paper": ("aa", {"init": "paper"}),
    }
    titles = {
        "plain": "convolutions only",
        "ge": "Gather-Excite",
        "se": "Squeeze-and-Excitation",
        "aa": "attention augmented",
        "aa-per-head": "attention with relative tables per head",
        "aa-no-position": "attention without positions",
        "aa-init-paper": "attention that begins as the paper's listing does",
    }
    for variant, (kind, options) in variants.items():
        yield Recipe(
            name=f"cifar100-small-{variant}",
            summary=f"Wide-ResNet-16-4 on CIFAR-100: {titles[variant]}",
            model=Model(f"{kind}_wrn16_4", options),
            data="cifar100",
            epochs=60,
            batch=256,
            weight_decay=5e-4,
            **ON_A_GPU,
        )


IMAGENETTE_KINDS = {
    "plain": "convolutions only",
    "se": "Squeeze-and-Excitation",
    "aa": "attention",
    "aa-window": "attention in windows of 13 x 13, in all stages",
}


def _imagenette() -> Iterator[Recipe]:
    """ResNets on photographs of ten ImageNet classes, 160 pixels: `--data folder/PATH` says where they are."""
    networks = [(kind, depth) for depth in (18, 50) for kind in IMAGENETTE_KINDS if kind != "aa-window"]
    for kind, depth in [*networks, ("aa-window", 50)]:
        yield Recipe(
            name=f"imagenette-{kind}-resnet{depth}",
            summary=f"ResNet-{depth} on Imagenette at 160 pixels: {IMAGENETTE_KINDS[kind]}",
            model=Model(f"{kind.replace('-', '_')}_resnet{depth}"),
            data="folder/imagenette160",
            size=160,
            epochs=80,
            batch=128,
            lr_base=0.128,
            weight_decay=1e-4,
            label_smoothing=0.1,
            workers=8,
            **ON_A_GPU,
        )


TINY_KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "plain": ("plain", {}, "convolutions only"),
    "se": ("se", {}, "Squeeze-and-Excitation"),
    "aa": ("aa", {}, "attention"),
    "aa-se": ("aa", {"gate": "se"}, "attention and Squeeze-and-Excitation"),
}


def _tiny_imagenet() -> Iterator[Recipe]:
    """ResNets on 64 pixels, without the pooling of their stem: the kinds of table 3 in an hour or so on one GPU, what
    sees the whole map without attending, and attention added where that is, beside whole convolutions."""
    for depth, where in ((18, "layer[234].*.conv1"), (50, "layer[234].*.conv2")):
        kinds = {
            variant: (title, Model(f"{kind}_resnet{depth}", {"stem_pool": False, **options}))
            for variant, (kind, options, title) in TINY_KINDS.items()
        }
        for variant, what, form in (
            ("average", "an even average over the map", {"instead": "average"}),
            ("aa-add", "attention", {"combine": "add"}),
        ):
            built = {"base": f"plain_resnet{depth}", "stem_pool": False, "augmentations": [{"where": where, **form}]}
            kinds[variant] = f"{what}, added in the last three stages", Model(AUGMENTED, built)
        for variant, (title, model) in kinds.items():
            yield Recipe(
                name=f"tiny-imagenet-resnet{depth}-{variant}",
                summary=f"ResNet-{depth} on Tiny-ImageNet: {title}",
                model=model,
                data="tiny-imagenet",
                epochs=60,
                batch=256,
                lr_base=0.2,
                weight_decay=5e-4,
                label_smoothing=0.1,
                in_memory=True,
                workers=16,
                **ON_A_GPU,
            )


DEMO_KINDS = {"plain": "convolutions only", "se": "with Squeeze-and-Excitation", "aa": "with attention"}


def _demo() -> Iterator[Recipe]:
    """A small network on `shapes`, on a CPU, in a minute: what `aaconv demo` trains, all three alike."""
    for kind, title in DEMO_KINDS.items():
        yield Recipe(
            name=f"demo-{kind}",
            summary=f"small network on shapes: {title}",
            model=Model(f"{kind}_small"),
            data="shapes",
            epochs=3,
            batch=64,
            train_limit=10_000,
            eval_limit=2_000,
            optimizer="adamw",
            lr=0.01,
            weight_decay=0.01,
        )


register(*_demo(), *_small(), *_imagenette(), *_tiny_imagenet(), *_of_the_paper())
