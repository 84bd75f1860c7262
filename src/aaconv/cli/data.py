"""Commands about data sets: data preview."""

import argparse

from .parsing import Parser, not_negative, one_of, positive


def add_commands(commands: Parser) -> None:
    data = commands.add("data", None, "look at a data set")
    data.expect("command")
    preview = data.add("preview", _preview, "draw a sheet of examples", "shapes -o sheet.png")
    preview.add_argument(
        "name",
        metavar="NAME",
        help="shapes, cifar10, cifar100, tiny-imagenet, imagenet, coco/PATH, folder/PATH, wds/PATH, hfds/NAME",
    )
    preview.add_argument("-o", "--output", metavar="FILE", help="an image file; default: NAME.png")
    preview.add_argument("--data-dir", metavar="DIR", help="where the data set is")
    preview.add_argument("--split", **one_of("split", ("train", "test")), default="train", help="train (default), test")
    preview.add_argument("--count", type=positive, default=24, metavar="N", help="examples, default: 24")
    preview.add_argument("--augmented", action="store_true", help="as training sees them, cropped and mirrored")
    preview.add_argument("--auto-augment", metavar="NAME", help="with it: rand-m9-mstd0.5, randaugment and the like")
    for name, what in (("random-erasing", "probability of it"), ("mixup", "its alpha"), ("cutmix", "its alpha")):
        preview.add_argument(f"--{name}", type=fraction, default=0.0, metavar="N", help=f"with it: {what}")
    preview.add_argument("--repeats", type=positive, default=1, metavar="N", help="each image N times, augmented")
    preview.add_argument("--size", type=positive, metavar="N", help="of the augmented images, default: as in training")
    preview.add_argument("--seed", type=not_negative, default=0, metavar="N", help="chooses the examples, default: 0")


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number, at least 0, got {text!r}")
    return value


def _preview(chosen: argparse.Namespace) -> None:
    from ..data import preview
    from ..data.policy import Policy

    path = chosen.output or f"{chosen.name.rstrip('/').rpartition('/')[2]}.png"
    how = {name: getattr(chosen, name) for name in ("data_dir", "split", "count", "seed", "size")}
    policy = Policy(chosen.auto_augment, chosen.random_erasing, chosen.mixup, chosen.cutmix, chosen.repeats)
    preview.save(chosen.name, path, policy=policy if chosen.augmented or policy != Policy() else None, **how)
    print(f"drew {path}")
