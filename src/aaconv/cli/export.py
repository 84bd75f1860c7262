"""Commands that take a network elsewhere: export, push, convert."""

import argparse

from .parsing import Parser, one_of, positive
from .source import add_augment, add_device, add_source, add_weights, augmentation

LAYOUTS = ("chexpert", "legendong", "leaderj1001")
DTYPES = ("float16", "bfloat16")
SOURCES = ("def99f9", "a6739a7")


def add_commands(commands: Parser) -> None:
    _add_export(commands)
    _add_push(commands)
    _add_convert(commands)


def _add_export(commands: Parser) -> None:
    about = "write a network as ONNX, torch.export program or weights"
    export = commands.add("export", _export, about, "runs/demo-aa -o model.onnx")
    add_source(export)
    export.add_argument("-o", "--output", required=True, metavar="FILE", help="a .onnx, .pt2 or .safetensors file")
    export.add_argument("--size", type=positive, metavar="N", help="input size N x N; default: the network's own")
    export.add_argument("--opset", type=positive, metavar="N", help="ONNX opset version, default: 18")
    export.add_argument("--raw", action="store_true", help="of a detector: outputs without postprocessing")
    export.add_argument("--fixed", action="store_true", help="fix height and width; the batch size stays free")
    export.add_argument("--data-dir", metavar="DIR", help=".safetensors: where the data set of its evaluation is")
    export.add_argument(
        "--dtype", **one_of("dtype", DTYPES), help=".safetensors: of the matrices, float16 (default) or bfloat16"
    )
    add_device(export, ".safetensors: ")
    add_weights(export)
    add_augment(export)


def _add_push(commands: Parser) -> None:
    about = "upload a run to the Hugging Face hub, with a model card"
    push = commands.add("push", _push, about, "runs/demo-aa my-name/demo-aa")
    push.add_argument("run_folder", metavar="RUN", help="a run folder")
    push.add_argument("repository", nargs="?", metavar="REPO", help="owner/name on the hub")
    push.add_argument("--to", metavar="DIR", help="write the hub's folder here instead of uploading it")
    push.add_argument("--private", action="store_true", help="make the repository private")
    push.add_argument("--weights", **one_of("weights", ("last", "best", "ema")), help="last, best or ema")


def _add_convert(commands: Parser) -> None:
    about = "convert AAConv weights of other implementations"
    convert = commands.add("convert", _convert, about, "theirs.pt -o model.safetensors --layout legendong")
    convert.add_argument("state", metavar="STATE", help="a state dict: .pt (tensors only) or .safetensors")
    convert.add_argument("-o", "--output", required=True, metavar="FILE", help="a .safetensors file")
    convert.add_argument(
        "--layout", **one_of("layout", LAYOUTS), help=f"{', '.join(LAYOUTS)}; default: recognised by the names"
    )
    convert.add_argument(
        "--source",
        **one_of("source", SOURCES),
        help="chexpert's commit: def99f9 or later (default), or a6739a7, before it",
    )
    convert.add_argument(
        "--inexact", action="store_true", help="also where the formulas differ: a start for further training"
    )


def _export(chosen: argparse.Namespace) -> None:
    if chosen.output.endswith(".safetensors"):
        _export_weights(chosen)
        return
    if not chosen.output.endswith((".onnx", ".pt2")):
        raise ValueError(
            f"the file must end in .onnx or .pt2, or for the weights of a run in .safetensors, got {chosen.output!r}"
        )
    from ..export.network import export

    if chosen.data_dir is not None:
        raise ValueError("--data-dir belongs to .safetensors files: others are run on random images")
    if chosen.dtype is not None:
        raise ValueError("--dtype belongs to .safetensors files: others keep the network's own")
    if chosen.device is not None:
        raise ValueError("--device belongs to .safetensors files: others are run on the CPU")
    export(
        chosen.source,
        chosen.output,
        size=chosen.size,
        opset=chosen.opset,
        raw=chosen.raw,
        fixed=chosen.fixed,
        weights=chosen.weights,
        pretrained=chosen.pretrained,
        augment=augmentation(chosen),
    )


def _export_weights(chosen: argparse.Namespace) -> None:
    from ..export.weights import export_weights

    for option in ("size", "opset", "raw", "fixed", "pretrained", "augment"):
        if getattr(chosen, option):
            raise ValueError(f"--{option} is not for .safetensors files, which hold the weights of a run; leave it out")
    how = {name: getattr(chosen, name) for name in ("weights", "data_dir", "device", "dtype")}
    export_weights(chosen.source, chosen.output, **how)


def _push(chosen: argparse.Namespace) -> None:
    from ..export.hub import push, save

    if (chosen.repository is None) == (chosen.to is None):
        raise ValueError("name either a repository on the hub, owner/name, or a folder with --to DIR")
    if chosen.to:
        print(f"wrote {save(chosen.run_folder, chosen.to, weights=chosen.weights)}")
    else:
        print(push(chosen.run_folder, chosen.repository, private=chosen.private, weights=chosen.weights))


def _convert(chosen: argparse.Namespace) -> None:
    from ..export.convert import convert_file

    for line in convert_file(
        chosen.state, chosen.output, layout=chosen.layout, source=chosen.source, inexact=chosen.inexact
    ):
        print(line)
