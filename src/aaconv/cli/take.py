"""Commands that look into a trained network and take it elsewhere: explore, report, export, push, convert."""

import argparse
from typing import Any

from .parsing import add, positive

SOURCE = "a run folder, or a registered model's name"
LAYOUTS = ("chexpert", "legendong", "leaderj1001")


def add_commands(commands: Any) -> None:
    _add_explore(commands)
    _add_report(commands)
    _add_export(commands)
    _add_push(commands)
    _add_convert(commands)


def _add_explore(commands: Any) -> None:
    explore = add(
        commands,
        "explore",
        _explore,
        "write one page that shows what each position of an image attends to",
        "runs/demo-aa cat.jpg dog.jpg -o page.html",
    )
    explore.add_argument("source", metavar="RUN|MODEL", help=SOURCE)
    explore.add_argument("images", nargs="+", metavar="IMAGE", help="image files; several make a strip of thumbnails")
    explore.add_argument("-o", "--output", metavar="FILE", help="default: explore.html")
    explore.add_argument("--static", metavar="FIGURE", help="the paper's figure instead: a .png, .pdf or .svg file")
    explore.add_argument(
        "--at", type=position, nargs="+", metavar="X,Y", help="positions of the figure, in pixels the network sees"
    )
    explore.add_argument(
        "--layers", nargs="+", metavar="NAME", help="of these layers only; wildcards such as 'layer3.*'"
    )
    explore.add_argument("--size", type=positive, metavar="N", help="images of N x N; default: the network's own")
    _add_weights(explore)
    explore.add_argument("--limit", type=positive, metavar="MB", help="the largest page to write, default: 50")


def _add_report(commands: Any) -> None:
    report = add(
        commands,
        "report",
        _report,
        "one page about runs: recipe, environment, curves, metrics, cost",
        "runs/demo-aa runs/demo-plain -o report.html",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    report.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default: report.html")
    report.add_argument("--explorer", metavar="PAGE", help="a page of `aaconv explore` to link to")


def _add_export(commands: Any) -> None:
    export = add(
        commands,
        "export",
        _export,
        "write a network as ONNX, as a torch.export program or as weights to ship, and check the file by running it",
        "runs/demo-aa -o model.onnx",
    )
    export.add_argument("source", metavar="RUN|MODEL", help=SOURCE)
    export.add_argument("-o", "--output", required=True, metavar="FILE", help="a .onnx, .pt2 or .safetensors file")
    export.add_argument("--size", type=positive, metavar="N", help="images of N x N; default: the network's own")
    export.add_argument("--opset", type=positive, metavar="N", help="ONNX operators of this version, default: 18")
    export.add_argument("--raw", action="store_true", help="detection: class and box outputs without post-processing")
    export.add_argument("--fixed", action="store_true", help="this height and width only; the batch stays free")
    export.add_argument("--data-dir", metavar="DIR", help=".safetensors: where the data lie that it is evaluated on")
    export.add_argument(
        "--device", metavar="DEVICE", help=".safetensors: cuda, cuda:1 or cpu; default: a GPU if there is one"
    )
    _add_weights(export)


def _add_push(commands: Any) -> None:
    push = add(
        commands,
        "push",
        _push,
        "upload a run to the Hugging Face hub, with a model card",
        "runs/demo-aa my-name/demo-aa",
    )
    push.add_argument("run_folder", metavar="RUN", help="a run folder")
    push.add_argument("repository", nargs="?", metavar="REPO", help="owner/name on the hub")
    push.add_argument("--to", metavar="DIR", help="write the hub's folder here instead of uploading it")
    push.add_argument("--private", action="store_true", help="a repository that only you can see")
    push.add_argument("--weights", choices=("last", "best", "ema"), metavar="weights", help="last, best or ema")


def _add_convert(commands: Any) -> None:
    convert = add(
        commands,
        "convert",
        _convert,
        "bring weights of other implementations' AAConv layers into ours",
        "theirs.pt -o model.safetensors --layout legendong",
    )
    convert.add_argument("state", metavar="STATE", help="a state dict: .pt (tensors only) or .safetensors")
    convert.add_argument("-o", "--output", required=True, metavar="FILE", help="a .safetensors file")
    convert.add_argument(
        "--layout", choices=LAYOUTS, metavar="layout", help=f"{', '.join(LAYOUTS)}; default: found by the names"
    )
    convert.add_argument(
        "--inexact", action="store_true", help="also where the formulas differ, to train on from there"
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", metavar="WHICH", help="of a run: last, best or ema; or a file of weights")
    parser.add_argument(
        "--pretrained", action="store_true", help="of a model's name: with its own weights, ours or timm's"
    )


def position(text: str) -> tuple[float, float]:
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected X,Y such as 112,80, got {text!r}") from None
    return x, y


def _explore(chosen: argparse.Namespace) -> None:
    from ..explore import page, write_figure, write_page

    common = {"size": chosen.size, "weights": chosen.weights, "pretrained": chosen.pretrained}
    if chosen.at and not chosen.static:
        raise ValueError("--at chooses the positions of a figure; it needs --static FIGURE")
    if chosen.static:
        path = write_figure(chosen.source, chosen.images, chosen.static, at=chosen.at, layers=chosen.layers, **common)
        print(f"drew {path}")
    if chosen.output or not chosen.static:
        limit = chosen.limit or page.LARGEST_PAGE
        output = chosen.output or "explore.html"
        print(write_page(chosen.source, chosen.images, output, layers=chosen.layers, largest=limit, **common))


def _report(chosen: argparse.Namespace) -> None:
    from ..report import write_report

    print(f"wrote {write_report(chosen.runs, chosen.output, explorer=chosen.explorer)}")


def _export(chosen: argparse.Namespace) -> None:
    if chosen.output.endswith(".safetensors"):
        _export_weights(chosen)
        return
    if not chosen.output.endswith((".onnx", ".pt2")):
        raise ValueError(
            f"the file must end in .onnx or .pt2, or for the weights of a run in .safetensors, got {chosen.output!r}"
        )
    from ..export import export

    if chosen.data_dir is not None:
        raise ValueError("--data-dir belongs to .safetensors files: others are run on random images")
    if chosen.device is not None:
        raise ValueError("--device belongs to .safetensors files: others are run on the processor")
    export(
        chosen.source,
        chosen.output,
        size=chosen.size,
        opset=chosen.opset,
        raw=chosen.raw,
        fixed=chosen.fixed,
        weights=chosen.weights,
        pretrained=chosen.pretrained,
    )


def _export_weights(chosen: argparse.Namespace) -> None:
    from ..ship import export_weights

    for option in ("size", "opset", "raw", "fixed", "pretrained"):
        if getattr(chosen, option):
            raise ValueError(f"--{option} is not for .safetensors files, which hold the weights of a run; leave it out")
    how = {"weights": chosen.weights, "data_dir": chosen.data_dir, "device": chosen.device}
    export_weights(chosen.source, chosen.output, **how)


def _push(chosen: argparse.Namespace) -> None:
    from ..hub import push, save

    if (chosen.repository is None) == (chosen.to is None):
        raise ValueError("name either a repository on the hub, owner/name, or a folder with --to DIR")
    if chosen.to:
        print(f"wrote {save(chosen.run_folder, chosen.to, weights=chosen.weights)}")
    else:
        print(push(chosen.run_folder, chosen.repository, private=chosen.private, weights=chosen.weights))


def _convert(chosen: argparse.Namespace) -> None:
    from ..convert import convert_file

    for line in convert_file(chosen.state, chosen.output, layout=chosen.layout, inexact=chosen.inexact):
        print(line)
