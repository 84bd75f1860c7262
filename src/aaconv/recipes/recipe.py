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
    def title(self) -> str:
        """What to call it: of a network that attention was put into, or what that is compared with, the name it had
        before."""
        if self.base == self.name:
            return self.name
        some = self.options.get("augmentations")
        mappings = [one for one in some if isinstance(one, dict)] if isinstance(some, list | tuple) else []
        added = dict.fromkeys(str(one.get("instead", "attention")) for one in mappings)
        named = " with ".join([self.base, *([" and ".join(added)] if added else [])])
        return named if "base" in self.options else f"RetinaNet on {named}"

    @property
    def base(self) -> str:
        """The network that pretrained weights are of: itself, or the one that it is built around."""
        keyword, default = AROUND.get(self.name, ("", self.name))
        return self.options.get(keyword, default)

    @property
    def network_options(self) -> dict[str, Any]:
        """The keywords that make the network; not those that only say which weights it starts from."""
        return {name: value for name, value in self.options.items() if name not in START_OPTIONS}


AROUND = {"augmented": ("base", "augmented"), "augmented_retinanet": ("backbone", "tf_efficientnet_lite0")}
"""Registered networks that are built around another: the keyword that names it, and its default."""
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
    normalize: Literal["data", "model"] = "data"
    """Mean and standard deviation of the images: the data set's, or those that a pretrained network has seen."""
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
    fold: int = 0
    """Which N images `holdout` takes: those of fold 0, 1, ... have none in common."""

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
    lr_backbone: float = 1.0
    """Factor of the learning rate for all parameters but those of the head and of attention."""
    lr_attention: float = 1.0
    """Factor of the learning rate for the parameters of attention."""
    layer_decay: float | None = None
    """Factor of the learning rate from each layer of the backbone to the layer before it; None: no decay."""
    head: Literal["drawn", "zero"] = "drawn"
    """Start of the last layer: drawn as the network does it, or zero, which lets a pretrained network begin unsure."""
    freeze_epochs: int = 0
    """First epochs in which only head and attention are trained; the backbone's batch norm statistics stay, too."""
    eps: float | None = None
    """Epsilon of the optimizer, where it has one; None: its default."""
    weight_decay: float = 0.0
    """Weight decay."""
    no_decay: tuple[str, ...] = ()
    """Parameters excluded from weight decay, as name patterns: *.rel_? are the relative tables, *.qkv.weight the
    projections to queries, keys and values."""
    decay: Literal["all", "matrices"] = "all"
    """Parameters with weight decay: all, as in the paper, or matrices, neither biases nor norms, as timm does it."""
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
    auto_augment: str | None = None
    """Random changes of single images: timm's rand-m9-mstd0.5, original, v0, 3a, augmix-m5 and the like, or
    torchvision's randaugment, trivialaugment, autoaugment, autoaugment-cifar10, which run where the images live."""
    random_erasing: float = 0.0
    """Probability that a rectangle of an image is erased."""
    mixup: float = 0.0
    """Alpha of mixup, which blends pairs of images and their labels; 0: none."""
    cutmix: float = 0.0
    """Alpha of CutMix, which puts a rectangle of another image into each; 0: none. With mixup one of both per batch."""
    repeats: int = 1
    """Repeated augmentation: an epoch takes every image N times in a row, and 1/N of all images."""
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
    patience: int | None = None
    """Evaluations without a better result after which the run stops; None: it does all epochs."""
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
        if self.fold and not self.holdout:
            raise ValueError(f"fold is for holdout, got fold={self.fold} with holdout=0; give --holdout N")
        if self.nesterov and self.optimizer not in ("momentum", "sgd"):
            raise ValueError(f"nesterov is for the optimizer 'momentum', got optimizer={self.optimizer!r}")
        if self.in_memory and self.task != "classify":
            raise ValueError(f"in_memory is for the task 'classify', got task={self.task!r}; leave it out")
        if self.head == "zero" and self.task != "classify":
            raise ValueError(f"head='zero' is for the task 'classify', got task={self.task!r}; leave it out")
        if self.ghost_batch is not None and self.sync_batch_norm:
            raise ValueError("ghost_batch and sync_batch_norm exclude each other: choose one")


LARGEST_SIZE = 16_384
"""Pixels of a side: an image of them is a gigabyte."""

_LIMITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("epochs batch train_limit eval_limit accumulate keep ghost_batch", lambda n: n >= 1, "at least 1"),
    ("size", lambda n: 1 <= n <= LARGEST_SIZE, f"1 to {LARGEST_SIZE}"),
    ("eval_every checkpoint_every", lambda n: n >= 1, "at least 1"),
    ("workers max_unreadable holdout fold seed weight_decay min_lr eps", lambda x: x >= 0, "at least 0"),
    ("freeze_epochs mixup cutmix", lambda n: n >= 0, "at least 0"),
    ("repeats", lambda n: n >= 1, "at least 1"),
    ("random_erasing", lambda p: 0 <= p <= 1, "0 to 1"),
    ("patience", lambda n: n >= 1, "at least 1"),
    ("lr lr_base lr_base_size lr_backbone lr_attention clip_grad", lambda x: 0 < x < float("inf"), "above 0"),
    ("warmup label_smoothing momentum", lambda x: 0 <= x < 1, "at least 0 and below 1"),
    ("ema decay_rate layer_decay", lambda x: 0 < x <= 1, "above 0 and at most 1"),
    ("decay_epochs", lambda epochs: all(epoch > 0 for epoch in epochs), "above 0"),
)
