"""`aaconv bench ...`: time and memory."""

import argparse
from typing import Any

from .parsing import Parser, not_negative, one_of, positive

VARIANTS = ("triton", "sdpa", "eager", "compiled", "bias", "flex", "nopos")


def add_commands(commands: Parser) -> None:
    bench = commands.add("bench", None, "measure time and memory")
    bench.expect("benchmark")
    _add_layer(bench)
    _add_attention(bench)
    _add_model(bench)
    _add_accelerate(bench)
    _add_table2(bench)
    _add_train(bench)
    _add_all(bench)


def _add_layer(bench: Parser) -> None:
    layer = bench.add("layer", _bench_layer, "AAConv2d on every backend, beside nn.Conv2d", "--sizes 32 --json")
    layer.add_argument("--sizes", type=positive, nargs="+", default=[14, 28, 32], metavar="N", help="maps of N x N")
    layer.add_argument("--batch", type=positive, default=8, metavar="N", help="batch size, default: 8")
    _add_common(layer)


def _add_attention(bench: Parser) -> None:
    about = "the attention operator alone, against torch's own ways"
    example = "--shapes 128:14x14:20/3 --variants triton flex"
    attention = bench.add("attention", _bench_attention, about, example)
    attention.add_argument(
        "--shapes",
        nargs="+",
        metavar="B:HxW:K/V[:N][@W]",
        help="batch, map, key and value depth per head, heads (8); default: the paper's, SAM's and BoTNet's",
    )
    attention.add_argument("--precision", **one_of("precision", ("bf16", "fp16", "float32")), help="default: bf16")
    attention.add_argument("--no-positions", action="store_true", help="without relative tables: triton, sdpa, eager")
    variants = one_of("variant", VARIANTS)
    attention.add_argument("--variants", nargs="+", **variants, help=f"of {', '.join(VARIANTS)}; default: all")
    _add_common(attention)


def _add_model(bench: Parser) -> None:
    about = "whole networks in bf16, compiled: inference and training"
    model = bench.add("model", _bench_model, about, "--models plain_wrn28_2 aa_wrn28_2 --size 32")
    model.add_argument(
        "--models",
        nargs="+",
        default=["plain_resnet50", "aa_resnet50"],
        metavar="NAME",
        help="the others are compared with the first; NAME:key_ratio=0.25,num_heads=4 sets options",
    )
    model.add_argument("--train", action="store_true", help="the training step only")
    model.add_argument("--infer", action="store_true", help="inference only")
    model.add_argument("--cpp-wrapper", action="store_true", help="compile to C++ that launches the kernels")
    _add_network(model)


def _add_accelerate(bench: Parser) -> None:
    about = "networks of timm before and after aaconv.accelerate"
    accelerate = bench.add("accelerate", _bench_accelerate, about, "--models samvit_base_patch16 --train")
    accelerate.add_argument(
        "--models",
        nargs="+",
        metavar="NAME",
        help="default: samvit_base_patch16, botnet26t_256; NAME:depth=4,num_heads=4 sets options",
    )
    accelerate.add_argument(
        "--batch", type=positive, metavar="N", help="batch size, default: 4 for SAM, 128 for BoTNet, on the CPU 1"
    )
    accelerate.add_argument("--size", type=positive, metavar="N", help="input size N x N, default: the network's own")
    accelerate.add_argument("--train", action="store_true", help="the training step only")
    accelerate.add_argument("--infer", action="store_true", help="inference only")
    accelerate.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    _add_common(accelerate)


def _add_table2(bench: Parser) -> None:
    about = "latencies of table 2: SE, BAM, CBAM, GALA and AA on ResNet-50"
    table2 = bench.add("table2", _bench_table2, about, "--json benchmarks/table2.json")
    table2.add_argument(
        "--complete",
        action="store_true",
        help="keep what the JSON file has, and measure the rest beside plain_resnet50",
    )
    _add_network(table2)


def _add_train(bench: Parser) -> None:
    about = "an epoch of the training loop against its bare steps"
    train = bench.add("train", _bench_train, about, "--data-dir data --json benchmarks/train.json")
    train.add_argument(
        "--model", metavar="NAME", help="default: plain_wrn28_10, on the CPU plain_wrn16_4; NAME:option=value sets one"
    )
    train.add_argument("--data-dir", metavar="DIR", help="where CIFAR-100 is; default: noise of its size")
    train.add_argument(
        "--size",
        type=positive,
        metavar="N",
        help="noise of N x N, on the device, cropped, flipped and coloured there, as by --in-memory of `aaconv train`",
    )
    train.add_argument("--batch", type=positive, metavar="N", help="batch size, default: 1024, on the CPU 16")
    train.add_argument("--images", type=positive, metavar="N", help="images per epoch; default: all, on the CPU 96")
    modes = one_of("mode", ("off", "default", "reduce-overhead", "max-autotune"))
    train.add_argument(
        "--compile",
        **modes,
        help="of torch.compile: off, default, reduce-overhead or max-autotune; default: default, on the CPU off",
    )
    precisions = one_of("precision", ("float32", "bf16", "fp16"))
    train.add_argument("--precision", **precisions, default="bf16", help="float32, bf16 (default) or fp16")
    _add_common(train)


def _add_all(bench: Parser) -> None:
    about = "the benchmarks of the documentation, on a GPU"
    everything = bench.add("all", _bench_all, about, "--to benchmarks")
    everything.add_argument(
        "--to",
        default="benchmarks",
        metavar="DIR",
        help="folder of the results, default: benchmarks; what it has of this commit and GPU is not measured again",
    )
    everything.add_argument("--only", nargs="+", metavar="NAME", help="some of them; --list shows all names")
    everything.add_argument(
        "--side-by-side",
        type=not_negative,
        default=0,
        metavar="N",
        help="compile N at a time before measuring; default: 0, each compiles when it is measured",
    )
    everything.add_argument("--limit", type=positive, metavar="SECONDS", help="stop after so long; the rest is left")
    everything.add_argument("--list", action="store_true", help="print the commands, and stop")


def _add_network(parser: Parser) -> None:
    parser.add_argument("--batch", type=positive, metavar="N", help="batch size, default: 128, on the CPU 2")
    parser.add_argument("--size", type=positive, default=224, metavar="N", help="input size N x N, default: 224")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    _add_common(parser)


def _add_common(parser: Parser) -> None:
    devices = one_of("device", ("cuda", "cpu"))
    parser.add_argument("--device", **devices, help="cuda or cpu; default: a GPU if there is one")
    parser.add_argument("--rounds", type=positive, metavar="N", help="how often each variant is timed")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write JSON to FILE after every row; without FILE print it instead of the table",
    )


def _bench_layer(chosen: argparse.Namespace) -> None:
    from ..benchmark import layer

    layer.run(chosen.sizes, chosen.batch, device=chosen.device, rounds=chosen.rounds, json_to=chosen.json)


def _bench_attention(chosen: argparse.Namespace) -> None:
    from ..benchmark import attention

    common = {"device": chosen.device, "rounds": chosen.rounds, "json_to": chosen.json}
    attention.run(
        chosen.shapes, chosen.variants, precision=chosen.precision, positions=not chosen.no_positions, **common
    )


def _bench_model(chosen: argparse.Namespace) -> None:
    from ..benchmark import model

    model.run(chosen.models, phases=_phases(chosen), cpp_wrapper=chosen.cpp_wrapper, **_network(chosen))


def _bench_accelerate(chosen: argparse.Namespace) -> None:
    from ..benchmark import accelerate

    accelerate.run(chosen.models, phases=_phases(chosen), **_network(chosen))


def _bench_table2(chosen: argparse.Namespace) -> None:
    from ..benchmark import table2

    table2.run(**_network(chosen), complete=chosen.complete)


def _bench_train(chosen: argparse.Namespace) -> None:
    from ..benchmark import train

    train.run(
        chosen.model,
        data_dir=chosen.data_dir,
        size=chosen.size,
        batch=chosen.batch,
        images=chosen.images,
        compile_mode=chosen.compile,
        precision=chosen.precision,
        device=chosen.device,
        rounds=chosen.rounds,
        json_to=chosen.json,
    )


def _bench_all(chosen: argparse.Namespace) -> None:
    from ..benchmark import everything

    everything.run(
        chosen.to, only=chosen.only, side_by_side=chosen.side_by_side, limit=chosen.limit, listed=chosen.list
    )


def _phases(chosen: argparse.Namespace) -> list[str]:
    both = chosen.train == chosen.infer
    wanted = {"infer": both or chosen.infer, "train": both or chosen.train}
    return [phase for phase in wanted if wanted[phase]]


def _network(chosen: argparse.Namespace) -> dict[str, Any]:
    return {
        "batch": chosen.batch,
        "size": chosen.size,
        "compiled": chosen.compile,
        "device": chosen.device,
        "rounds": chosen.rounds,
        "json_to": chosen.json,
    }
