"""What a training run is made of: one frozen dataclass, every field of which the command line can override."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..utils.numbers import is_whole


@dataclass(frozen=True)
class Model:
    """A network by its registered name, and the keywords it is built with (num_heads, position, key_ratio, ...)."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def network_options(self) -> dict[str, Any]:
        """The keywords that make the network; not those that only say which weights it starts from."""
        return {name: value for name, value in self.options.items() if name not in START_OPTIONS}


START_OPTIONS = ("pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
"""timm's keywords for weights that training starts from; a network that was trained has its own."""


@dataclass(frozen=True)
class Evidence:
    """The cell of the paper that an experiment stands behind: aaconv.paper has its value."""

    table: int
    row: str


@dataclass(frozen=True)
class Recipe:
    """One experiment, complete: the same recipe and seed give the same run."""

    name: str
    """What the recipe is called, and the run's folder after it."""
    summary: str
    """What it is, in one line."""
    model: Model
    data: str
    """shapes, cifar10, cifar100, imagenet, folder/PATH, wds/PATH or hfds/NAME; coco/PATH to detect."""
    epochs: int
    """Passes over the training images."""
    batch: int
    """Images per step, over all processes and gradient accumulation steps."""

    task: Literal["classify", "detect"] = "classify"
    evidence: Evidence | None = None

    data_dir: str | None = None
    """Where the data lie; none: $AACONV_DATA, or ~/.cache/aaconv/data."""
    size: int | None = None
    """Height and width of the images; None: those of a small data set, else 224."""
    workers: int = 4
    """Processes that read and augment images; small data sets need none."""
    max_unreadable: int = 100
    """Broken images that are skipped before the run stops."""
    train_limit: int | None = None
    """Train on N images only, chosen at random, the same for every seed; of shapes the first N."""
    eval_limit: int | None = None
    """Evaluate on N images only, chosen likewise."""
    holdout: int = 0
    """Evaluate on N images held out of the training set, never on the test set: to tune hyperparameters."""

    optimizer: str = "momentum"
    """By timm's name; "momentum" is SGD with momentum as in the paper, "sgd" has Nesterov's."""
    lr: float | None = None
    """The peak learning rate; None: lr_base * batch / lr_base_size, the paper's rule."""
    lr_base: float = 0.2
    """The peak learning rate of a batch of lr_base_size."""
    lr_base_size: int = 256
    momentum: float = 0.9
    eps: float | None = None
    """Epsilon of the optimiser, where it has one; None: its own default."""
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ()
    """Parameters excluded from weight decay, by wildcard: *.rel_? are the relative tables, *.qkv.weight projects to
    queries, keys and values."""
    clip_grad: float | None = None
    """Max gradient norm (clipping)."""
    accumulate: int = 1
    """Gradient accumulation steps per batch."""

    schedule: Literal["cosine", "step", "exponential", "constant"] = "cosine"
    warmup: float = 0.05
    """Part of the epochs in which the learning rate rises linearly from 0."""
    decay_epochs: tuple[float, ...] = ()
    """For "step": the epochs of learning-rate decay. For "exponential": the epochs between two decays."""
    decay_rate: float = 0.1
    """Factor of the learning rate at each decay."""
    min_lr: float = 0.0
    """Learning rate at the end of the cosine."""

    label_smoothing: float = 0.0
    ema: float | None = None
    """Decay of the moving average of the weights (EMA), which is then what is evaluated."""

    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """Autocast dtype (mixed precision); the weights stay float32."""
    channels_last: bool = True
    """channels_last memory format, which convolutions are fast with."""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"
    """Mode of torch.compile for the training step."""
    sync_batch_norm: bool = False
    """Batch norm statistics over all processes, not per process."""
    deterministic: bool = False
    """Deterministic algorithms only: the same bits every time, as on a CPU anyway."""
    seed: int = 0
    """Weights, order and augmentation follow from it."""

    eval_every: int = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None: one at the end of each epoch."""
    keep: int = 3
    """Checkpoints kept, the newest ones."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and not is_whole(value):
                raise ValueError(f"{name} must fit 64 bits, got a number of {value.bit_length()}")
        for names, fits, expected in _LIMITS:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not fits(value):
                    raise ValueError(f"{name} must be {expected}, got {name}={value}")
        if self.schedule == "step" and not self.decay_epochs:
            raise ValueError("the schedule 'step' needs decay_epochs, got none")
        if self.schedule == "exponential" and len(self.decay_epochs) != 1:
            raise ValueError(f"the schedule 'exponential' needs one of decay_epochs, got {list(self.decay_epochs)}")
        if self.batch % self.accumulate:
            raise ValueError(f"batch must be divisible by accumulate, got {self.batch} and {self.accumulate}")


LARGEST_SIZE = 16_384
"""Pixels of a side: an image of them is a gigabyte."""

_LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("epochs batch train_limit eval_limit accumulate keep", lambda n: n >= 1, "at least 1"),
    ("size", lambda n: 1 <= n <= LARGEST_SIZE, f"1 to {LARGEST_SIZE}"),
    ("eval_every checkpoint_every", lambda n: n >= 1, "at least 1"),
    ("workers max_unreadable holdout seed weight_decay min_lr eps", lambda x: x >= 0, "at least 0"),
    ("lr lr_base lr_base_size clip_grad", lambda x: 0 < x < float("inf"), "above 0"),
    ("warmup label_smoothing momentum", lambda x: 0 <= x < 1, "at least 0 and below 1"),
    ("ema decay_rate", lambda x: 0 < x <= 1, "above 0 and at most 1"),
    ("decay_epochs", lambda epochs: all(epoch > 0 for epoch in epochs), "above 0"),
)
