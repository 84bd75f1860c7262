"""Commands that write pages: explore, report."""

import argparse

from .parsing import Parser, positive
from .source import add_augment, add_source, add_weights, augmentation


def add_commands(commands: Parser) -> None:
    _add_explore(commands)
    _add_report(commands)


def _add_explore(commands: Parser) -> None:
    about = "write a page that shows what each pixel attends to"
    explore = commands.add("explore", _explore, about, "runs/demo-aa cat.jpg dog.jpg -o page.html")
    add_source(explore)
    explore.add_argument("images", nargs="+", metavar="IMAGE", help="files, folders or quoted patterns")
    explore.add_argument("-o", "--output", metavar="FILE", help="the page, default: explore.html")
    explore.add_argument("--static", metavar="FIGURE", help="the paper's figure instead: a .png, .pdf or .svg file")
    explore.add_argument(
        "--at", type=position, nargs="+", metavar="X,Y", help="query positions of the figure, in input pixels"
    )
    explore.add_argument("--layers", nargs="+", metavar="NAME", help="these layers only; patterns such as 'layer3.*'")
    explore.add_argument("--size", type=positive, metavar="N", help="input size N x N; default: the network's own")
    add_weights(explore)
    add_augment(explore)
    explore.add_argument("--limit", type=positive, metavar="MB", help="largest page to write, default: 50")


def _add_report(commands: Parser) -> None:
    about = "write a page about runs: curves, metrics, recipes, cost"
    report = commands.add("report", _report, about, "runs/demo-aa runs/demo-plain -o report.html")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    report.add_argument("-o", "--output", default="report.html", metavar="FILE", help="the page, default: report.html")
    report.add_argument("--explorer", metavar="PAGE", help="a page of `aaconv explore` to link to")


def position(text: str) -> tuple[float, float]:
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected X,Y such as 112,80, got {text!r}") from None
    return x, y


def _explore(chosen: argparse.Namespace) -> None:
    from ..explore import page, write_figure, write_page

    if chosen.at and not chosen.static:
        raise ValueError("--at chooses the positions of a figure; it needs --static FIGURE")
    common = {"size": chosen.size, "weights": chosen.weights, "pretrained": chosen.pretrained}
    common["augment"] = augmentation(chosen)
    if chosen.static:
        path = write_figure(chosen.source, chosen.images, chosen.static, at=chosen.at, layers=chosen.layers, **common)
        print(f"drew {path}")
    if chosen.output or not chosen.static:
        limit = chosen.limit or page.LARGEST_PAGE
        output = chosen.output or "explore.html"
        print(write_page(chosen.source, chosen.images, output, layers=chosen.layers, largest=limit, **common))


def _report(chosen: argparse.Namespace) -> None:
    from ..runs.report import write_report

    print(f"wrote {write_report(chosen.runs, chosen.output, explorer=chosen.explorer)}")
