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
    """Name of the recipe; the run folder is named after it."""
    summary: str
    """What it is, in one line."""
    model: Model
    data: str
    """shapes, shapes:distance=N, cifar10, cifar100, tiny-imagenet, imagenet, folder/PATH, wds/PATH or hfds/NAME;
    coco/PATH for detection."""
    epochs: int
    """Epochs to train."""
    batch: int
    """Batch size of an optimizer step, over all processes and accumulation steps."""

    task: Literal["classify", "detect"] = "classify"
    """Kind of training."""
    evidence: Evidence | None = None

    data_dir: str | None = None
    """Folder of the data set; None: $AACONV_DATA, or ~/.cache/aaconv/data."""
    size: int | None = None
    """Input height and width; None: those of a small data set, else 224."""
    workers: int = 4
    """Data loader workers; small data sets need none."""
    in_memory: bool = False
    """Decode the images of files once, at the input size, and keep them on the device; small data sets are anyway."""
    max_unreadable: int = 100
    """Unreadable images that are skipped before the run stops."""
    train_limit: int | None = None
    """Train on N images only, chosen at random, the same for every seed; of shapes the first N."""
    eval_limit: int | None = None
    """Evaluate on N images only, chosen likewise."""
    holdout: int = 0
    """Evaluate on N images held out of the training set, never on the test set: for hyperparameter search."""

    optimizer: str = "momentum"
    """Name of a timm optimizer; "momentum" is SGD with momentum as in the paper, "sgd" uses Nesterov momentum."""
    lr: float | None = None
    """Peak learning rate; None: lr_base * batch / lr_base_size, the paper's rule."""
    lr_base: float = 0.2
    """Peak learning rate at a batch size of lr_base_size."""
    lr_base_size: int = 256
    """Batch size that lr_base is meant for."""
    momentum: float = 0.9
    """Momentum of the optimizer."""
    nesterov: bool = False
    """Nesterov momentum for the optimizer "momentum"; "sgd" has it anyway."""
    eps: float | None = None
    """Epsilon of the optimizer, where it has one; None: its default."""
    weight_decay: float = 0.0
    """Weight decay."""
    no_decay: tuple[str, ...] = ()
    """Parameters excluded from weight decay, as name patterns: *.rel_? are the relative tables, *.qkv.weight the
    projections to queries, keys and values."""
    clip_grad: float | None = None
    """Max gradient norm (clipping)."""
    accumulate: int = 1
    """Gradient accumulation steps."""

    schedule: Literal["cosine", "step", "exponential", "constant"] = "cosine"
    """Learning rate schedule."""
    warmup: float = 0.05
    """Fraction of the epochs with a linear warm-up of the learning rate from 0."""
    decay_epochs: tuple[float, ...] = ()
    """For "step": epochs at which the learning rate is multiplied by decay_rate. For "exponential": epochs between two
    decays."""
    decay_rate: float = 0.1
    """Factor of a learning rate decay."""
    min_lr: float = 0.0
    """Learning rate at the end of the cosine schedule."""

    label_smoothing: float = 0.0
    """Label smoothing."""
    ema: float | None = None
    """Decay of the exponential moving average of the weights, which is then evaluated, too."""

    precision: Literal["float32", "bf16", "fp16"] = "float32"
    """Autocast dtype (mixed precision); the weights stay float32."""
    channels_last: bool = True
    """channels_last memory format, which convolutions are fast in."""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"
    """Mode of torch.compile for the training step."""
    sync_batch_norm: bool = False
    """Batch norm statistics over all processes."""
    ghost_batch: int | None = None
    """Images per group of batch norm statistics (ghost batch norm); None: all of a process."""
    deterministic: bool = False
    """Deterministic algorithms only; on the CPU they are anyway."""
    seed: int = 0
    """Seed of weights, data order and augmentation."""

    eval_every: int = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; None: one per epoch."""
    keep: int = 3
    """Checkpoints to keep, the newest ones."""

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
        if self.nesterov and self.optimizer not in ("momentum", "sgd"):
            raise ValueError(f"nesterov is for the optimizer 'momentum', got optimizer={self.optimizer!r}")
        if self.in_memory and self.task != "classify":
            raise ValueError(f"in_memory is for the task 'classify', got task={self.task!r}; leave it out")
        if self.ghost_batch is not None and self.sync_batch_norm:
            raise ValueError("ghost_batch and sync_batch_norm exclude each other: choose one")


LARGEST_SIZE = 16_384
"""Pixels of a side: an image of them is a gigabyte."""

_LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("epochs batch train_limit eval_limit accumulate keep ghost_batch", lambda n: n >= 1, "at least 1"),
    ("size", lambda n: 1 <= n <= LARGEST_SIZE, f"1 to {LARGEST_SIZE}"),
    ("eval_every checkpoint_every", lambda n: n >= 1, "at least 1"),
    ("workers max_unreadable holdout seed weight_decay min_lr eps", lambda x: x >= 0, "at least 0"),
    ("lr lr_base lr_base_size clip_grad", lambda x: 0 < x < float("inf"), "above 0"),
    ("warmup label_smoothing momentum", lambda x: 0 <= x < 1, "at least 0 and below 1"),
    ("ema decay_rate", lambda x: 0 < x <= 1, "above 0 and at most 1"),
    ("decay_epochs", lambda epochs: all(epoch > 0 for epoch in epochs), "above 0"),
)
