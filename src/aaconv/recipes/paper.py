"""The paper's tables 1 to 9 as printed, and for each row the model that stands behind it.

Values are strings, so that they keep the printed precision; "-" is a dash in the paper. A `note` says where a setting
was fitted (the text does not give it, and this one makes the printed cells come out) or why a cell cannot agree; in it
`{ours}` stands for the cost of the row's model, `{usual}` for that of the same model without the `fitted` options.
`start` are options with which the network begins as the paper's code did: runs with them have a line of their own.
"""

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Row:
    name: str
    cells: dict[str, str]
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    fitted: dict[str, object] = field(default_factory=dict)
    note: str | None = None
    cell_notes: dict[str, str] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)

    @property
    def started(self) -> "Row":
        """The line of runs that begin as the paper's code did: its accuracies beside the paper's, and no costs."""
        accuracies = {column: value for column, value in self.cells.items() if column in ACCURACY}
        with_start = ", ".join([self.name, *(f"{name}={value!r}" for name, value in self.start.items())])
        return replace(
            self,
            name=with_start,
            cells=accuracies,
            options=self.options | self.start,
            fitted={},
            cell_notes=dict.fromkeys(accuracies, _STARTED),
            start={},
        )


@dataclass(frozen=True)
class PaperTable:
    number: int
    title: str
    dataset: str
    size: tuple[int, int]
    rows: tuple[Row, ...]
    smaller: tuple[Row, ...] = ()
    """Networks of the same family that the paper does not have, and that we train on small images; without cells."""

    @property
    def columns(self) -> list[str]:
        return list(self.rows[0].cells)


def _row(name: str, columns: str, values: str, model: str, **extra: Any) -> Row:
    """A row as it stands in print: column names and values separated by blanks, `|` where a value has blanks itself."""
    split = values.split("|") if "|" in values else values.split()
    cells = dict(zip(columns.split(), (value.strip() for value in split), strict=True))
    return Row(name, cells, model, **extra)


def _ratio(ratio: float) -> dict[str, object]:
    return {"key_ratio": ratio, "value_ratio": ratio}


ACCURACY = ("top-1", "top-5", "mAP", "mAP50", "mAP75")
LATENCY = ("infer", "train")
"""The columns that give a time's increase over ResNet-50."""

_PER_HEAD = (
    "fitted: one pair of relative tables per head (share_heads=False); tables shared by the heads, as the text says "
    "and as is the default, give {usual.params:,} parameters and {usual.gflops:.3f} GFlops"
)
_STARTED = (
    "begun as the paper's listing begins, unlike the row above: Glorot's weights and biases in the projections, tables "
    "of deviation 1; {ours.params:,} parameters"
)
_CIFAR = "Params GFlops top-1 top-5"
TABLE_1 = (
    _row("Wide-ResNet", _CIFAR, "36.3M 10.4 80.3 95.0", "plain_wrn28_10"),
    _row("GE-Wide-ResNet", _CIFAR, "36.3M 10.4 79.8 95.0", "ge_wrn28_10"),
    _row("SE-Wide-ResNet", _CIFAR, "36.5M 10.4 81.0 95.3", "se_wrn28_10"),
    _row(
        "AA-Wide-ResNet",
        _CIFAR,
        "36.2M 10.9 81.6 95.2",
        "aa_wrn28_10",
        fitted={"share_heads": False},
        note=_PER_HEAD,
        start={"init": "paper"},
    ),
)

_MECHANISMS = "Params infer train top-1"
_WIDTH_MATCHED = {"top-1": "in parentheses: scaled in width to about 25.6M parameters"}
TABLE_2 = (
    _row("ResNet-50", _MECHANISMS, "25.6M - - 76.4", "plain_resnet50"),
    _row("SE", _MECHANISMS, "28.1M|+12%|+92%|77.5 (77.0)", "se_resnet50", cell_notes=_WIDTH_MATCHED),
    _row("BAM", _MECHANISMS, "25.9M +19% +43% 77.3", "bam_resnet50"),
    _row("CBAM", _MECHANISMS, "28.1M|+56%|+132%|77.4 (77.4)", "cbam_resnet50", cell_notes=_WIDTH_MATCHED),
    _row("GALA", _MECHANISMS, "29.4M|+86%|+133%|77.5 (77.3)", "gala_resnet50", cell_notes=_WIDTH_MATCHED),
    _row("AA (upsilon = 0.25)", _MECHANISMS, "24.3M +29% +25% 77.7", "aa_resnet50", options=_ratio(0.25)),
)

_IMAGENET = "GFlops Params top-1 top-5"
TABLE_3 = (
    _row("ResNet-34", _IMAGENET, "7.4 21.8M 73.6 91.5", "plain_resnet34"),
    _row("SE-ResNet-34", _IMAGENET, "7.4 22.0M 74.3 91.8", "se_resnet34"),
    _row("AA-ResNet-34", _IMAGENET, "7.1 20.7M 74.7 92.0", "aa_resnet34"),
    _row("ResNet-50", _IMAGENET, "8.2 25.6M 76.4 93.1", "plain_resnet50"),
    _row("SE-ResNet-50", _IMAGENET, "8.2 28.1M 77.5 93.7", "se_resnet50"),
    _row("AA-ResNet-50", _IMAGENET, "8.3 25.8M 77.7 93.8", "aa_resnet50"),
    _row("ResNet-101", _IMAGENET, "15.6 44.5M 77.9 94.0", "plain_resnet101"),
    _row("SE-ResNet-101", _IMAGENET, "15.6 49.3M 78.4 94.2", "se_resnet101"),
    _row("AA-ResNet-101", _IMAGENET, "16.1 45.4M 78.7 94.4", "aa_resnet101"),
    _row("ResNet-152", _IMAGENET, "23.0 60.2M 78.4 94.2", "plain_resnet152"),
    _row("SE-ResNet-152", _IMAGENET, "23.1 66.8M 78.9 94.5", "se_resnet152"),
    _row("AA-ResNet-152", _IMAGENET, "23.8 61.6M 79.1 94.6", "aa_resnet152"),
)
SMALLER_RESNETS = (
    Row("ResNet-18", {}, "plain_resnet18"),
    Row("SE-ResNet-18", {}, "se_resnet18"),
    Row("AA-ResNet-18", {}, "aa_resnet18"),
)

_FITTED_MNASNET = (
    "fitted: the expansion 1x1 of blocks 4 to 16 is augmented, at least one key and value channel per head, biases in "
    "the projections, attention at 14 x 3, 28, 14 x 6, 7 x 3"
)
TABLE_4 = (
    _row("MnasNet-0.75", _IMAGENET, "0.45 2.91M 73.3 91.3", "plain_mnasnet_075"),
    _row("AA-MnasNet-0.75", _IMAGENET, "0.51 3.02M 73.9 91.6", "aa_mnasnet_075", note=_FITTED_MNASNET),
    _row(
        "MnasNet-1.0",
        _IMAGENET,
        "0.63 3.89M 75.2 92.4",
        "plain_mnasnet_100",
        cell_notes={
            "GFlops": "cannot agree: {ours.gflops:.4f} is 0.625 when rounded to three digits, and that again 0.63"
        },
    ),
    _row("AA-MnasNet-1.0", _IMAGENET, "0.70 4.06M 75.7 92.6", "aa_mnasnet_100", note=_FITTED_MNASNET),
    _row("MnasNet-1.25", _IMAGENET, "1.01 5.26M 76.7 93.2", "plain_mnasnet_125"),
    _row("AA-MnasNet-1.25", _IMAGENET, "1.11 5.53M 77.2 93.6", "aa_mnasnet_125", note=_FITTED_MNASNET),
    _row(
        "MnasNet-1.4",
        _IMAGENET,
        "1.17 6.10M 77.2 93.5",
        "plain_mnasnet_140",
        cell_notes={
            "Params": "cannot agree: {ours.params:,} is 6.11M when rounded; the paper seems to have cut it off"
        },
    ),
    _row("AA-MnasNet-1.4", _IMAGENET, "1.29 6.44M 77.7 93.8", "aa_mnasnet_140", note=_FITTED_MNASNET),
)

_COCO = "GFlops Params mAP mAP50 mAP75"
_FITTED_RETINANET = (
    "fitted: no minimum of key channels per head, blocks with a stride not augmented, attention at 20, 40, 20"
)
TABLE_5 = (
    _row("ResNet-50", _COCO, "182 33.4M 36.8 54.5 39.5", "plain_retinanet_resnet50"),
    _row("SE-ResNet-50", _COCO, "183 35.9M 36.5 54.0 39.1", "se_retinanet_resnet50"),
    _row("AA-ResNet-50", _COCO, "182 33.1M 38.2 56.5 40.7", "aa_retinanet_resnet50", note=_FITTED_RETINANET),
    _row("ResNet-101", _COCO, "243 52.4M 38.5 56.4 41.2", "plain_retinanet_resnet101"),
    _row("SE-ResNet-101", _COCO, "243 57.2M 37.4 55.0 39.9", "se_retinanet_resnet101"),
    _row("AA-ResNet-101", _COCO, "245 51.7M 39.2 57.8 41.9", "aa_retinanet_resnet101", note=_FITTED_RETINANET),
)

_TWICE_ROUNDED = {"GFlops": "cannot agree: {ours.gflops:.4f} is 6.75 when rounded to three digits, and that again 6.8"}
TABLE_6 = (
    _row("ResNet-34", _IMAGENET, "7.4 21.8M 73.6 91.5", "plain_resnet34"),
    _row("ResNet-50", _IMAGENET, "8.2 25.6M 76.4 93.1", "plain_resnet50"),
    _row("kappa = upsilon = 0.25", _IMAGENET, "7.9 24.3M 77.7 93.8", "aa_resnet50", options=_ratio(0.25)),
    _row("kappa = upsilon = 0.5", _IMAGENET, "7.3 22.3M 77.3 93.6", "aa_resnet50", options=_ratio(0.5)),
    _row(
        "kappa = upsilon = 0.75",
        _IMAGENET,
        "6.8 20.7M 76.7 93.2",
        "aa_resnet50",
        options=_ratio(0.75),
        cell_notes=_TWICE_ROUNDED,
    ),
    _row("kappa = upsilon = 1.0", _IMAGENET, "6.3 19.4M 73.9 91.5", "aa_resnet50", options=_ratio(1.0)),
)


def _position(model: str, name: str, position: str, values: str, columns: str = "top-1 top-5") -> Row:
    options = {} if position == "relative" else {"position": position}
    return _row(name, columns, values, model, options=options)


TABLE_7 = (
    _position("aa_resnet34", "AA-ResNet-34, none", "none", "74.4 91.9"),
    _position("aa_resnet34", "AA-ResNet-34, 2d sine", "sinusoidal", "74.4 92.0"),
    _position("aa_resnet34", "AA-ResNet-34, CoordConv", "coordconv", "74.4 92.0"),
    _position("aa_resnet34", "AA-ResNet-34, relative", "relative", "74.7 92.0"),
    _position("aa_resnet50", "AA-ResNet-50, none", "none", "77.5 93.7"),
    _position("aa_resnet50", "AA-ResNet-50, 2d sine", "sinusoidal", "77.5 93.7"),
    _position("aa_resnet50", "AA-ResNet-50, CoordConv", "coordconv", "77.5 93.8"),
    _position("aa_resnet50", "AA-ResNet-50, relative", "relative", "77.7 93.8"),
)

TABLE_8 = (
    _position("aa_retinanet_resnet50", "none", "none", "37.7 56.0 40.2", "mAP mAP50 mAP75"),
    _position("aa_retinanet_resnet50", "CoordConv", "coordconv", "37.4 55.5 40.1", "mAP mAP50 mAP75"),
    _position("aa_retinanet_resnet50", "relative", "relative", "38.2 56.5 40.7", "mAP mAP50 mAP75"),
)

_ATTENTION = "Memory Params FLOPS"
_KIB = "KB is 1024 bytes; maps in bfloat16"
_TWO_DIGITS = {"Memory": _KIB, "Params": "printed to two digits, as the two rows above"}
TABLE_9 = (
    _row("{Stage 2 - H=W=14} * 4", _ATTENTION, "600KB 43k 22M", "aa_resnet50", cell_notes={"Memory": _KIB}),
    _row("{Stage 3 - H=W=14} * 6", _ATTENTION, "600KB 90k 40M", "aa_resnet50", cell_notes={"Memory": _KIB}),
    _row("{Stage 4 - H=W=7} * 3", _ATTENTION, "37.5KB 190k 19M", "aa_resnet50", cell_notes=_TWO_DIGITS),
    _row("Training (total)", _ATTENTION, "6MB 1.3M 390M", "aa_resnet50", cell_notes={"Memory": _KIB}),
    _row("Inference (largest map)", _ATTENTION, "600KB 1.3M 390M", "aa_resnet50", cell_notes={"Memory": _KIB}),
)

_TITLES = (
    ("Wide-ResNet-28-10 on CIFAR-100", "cifar100", 32, TABLE_1),
    ("attention mechanisms on ImageNet, ResNet-50", "imagenet", 224, TABLE_2),
    ("ResNets on ImageNet", "imagenet", 224, TABLE_3),
    ("MnasNet on ImageNet", "imagenet", 224, TABLE_4),
    ("RetinaNet on COCO", "coco", 640, TABLE_5),
    ("ratio of attentional channels, ResNet-50 on ImageNet", "imagenet", 224, TABLE_6),
    ("position encodings on ImageNet", "imagenet", 224, TABLE_7),
    ("position encodings on COCO, RetinaNet with AA-ResNet-50", "coco", 640, TABLE_8),
    ("cost of the attention in ResNet-50, per image and layer (appendix)", "imagenet", 224, TABLE_9),
)
TABLES = {
    number: PaperTable(number, title, dataset, (side, side), rows, SMALLER_RESNETS if rows is TABLE_3 else ())
    for number, (title, dataset, side, rows) in enumerate(_TITLES, 1)
}
