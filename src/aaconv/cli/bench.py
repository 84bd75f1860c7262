"""`aaconv bench ...`: time and memory."""

import argparse
from typing import Any

from .parsing import add, positive

VARIANTS = ("triton", "sdpa", "eager", "compiled", "flex")


def add_commands(commands: Any) -> None:
    bench = add(commands, "bench", None, "measure time and memory: layer, attention, model, table2, train")
    benches = bench.add_subparsers(title="benchmarks", dest="benchmark", metavar="benchmark", required=True)
    _add_layer(benches)
    _add_attention(benches)
    _add_model(benches)
    _add_table2(benches)
    _add_train(benches)


def _add_layer(benches: Any) -> None:
    layer = add(benches, "layer", _bench_layer, "AAConv2d on every backend beside nn.Conv2d", "--sizes 32 --json")
    layer.add_argument("--sizes", type=positive, nargs="+", default=[14, 28, 32], metavar="N", help="maps of N x N")
    layer.add_argument("--batch", type=positive, default=8, metavar="N", help="default: 8")
    _add_common(layer)


def _add_attention(benches: Any) -> None:
    attention = add(
        benches,
        "attention",
        _bench_attention,
        "the attention operator alone, inside CUDA graphs, against eager and FlexAttention",
        "--shapes 128:14x14:20/3 4:64x64:20/3 --variants triton flex",
    )
    attention.add_argument(
        "--shapes",
        nargs="+",
        metavar="B:HxW:K/V",
        help="batch, map, key and value depth of a head; default: the paper's",
    )
    attention.add_argument(
        "--variants", nargs="+", choices=VARIANTS, metavar="variant", help=f"of {', '.join(VARIANTS)}"
    )
    _add_common(attention)


def _add_model(benches: Any) -> None:
    model = add(
        benches,
        "model",
        _bench_model,
        "whole networks, compiled, bf16, inference and training, with and without CUDA graphs",
        "--models plain_wrn28_10 aa_wrn28_10 --batch 256 --size 32",
    )
    model.add_argument(
        "--models",
        nargs="+",
        default=["plain_resnet50", "aa_resnet50"],
        metavar="NAME",
        help="the first is what the others are compared with; NAME:key_ratio=0.25,num_heads=4 sets options",
    )
    model.add_argument("--train", action="store_true", help="the training step only")
    model.add_argument("--infer", action="store_true", help="inference only")
    model.add_argument("--cpp-wrapper", action="store_true", help="compiled to launch kernels from C++, not Python")
    _add_network(model)


def _add_table2(benches: Any) -> None:
    table2 = add(
        benches,
        "table2",
        _bench_table2,
        "the latencies of the paper's table 2: SE, BAM, CBAM, GALA and AA on ResNet-50",
        "--json benchmarks/table2.json",
    )
    table2.add_argument(
        "--complete", action="store_true", help="keep what FILE holds and measure the rest, beside the plain network"
    )
    _add_network(table2)


def _add_train(benches: Any) -> None:
    train = add(
        benches,
        "train",
        _bench_train,
        "an epoch of the training loop against its bare compiled steps",
        "--data-dir data --json benchmarks/train.json",
    )
    train.add_argument(
        "--model", metavar="NAME", help="default: plain_wrn28_10, on the processor plain_wrn16_4; NAME:option=value"
    )
    train.add_argument("--data-dir", metavar="DIR", help="where CIFAR-100 lies; without it noise of its size is used")
    train.add_argument("--batch", type=positive, metavar="N", help="default: 1024, on the processor 16")
    train.add_argument("--images", type=positive, metavar="N", help="of an epoch; default: all, on the processor 96")
    train.add_argument(
        "--compile",
        choices=("off", "default", "reduce-overhead", "max-autotune"),
        metavar="mode",
        help="off, default, reduce-overhead or max-autotune; default: default, on the processor off",
    )
    train.add_argument(
        "--precision",
        choices=("float32", "bf16", "fp16"),
        default="bf16",
        metavar="precision",
        help="float32, bf16 (default) or fp16",
    )
    _add_common(train)


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=positive, metavar="N", help="default: 128, on the processor 2")
    parser.add_argument("--size", type=positive, default=224, metavar="N", help="images of N x N, default: 224")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), metavar="device", help="cuda or cpu; default: what is there"
    )
    parser.add_argument("--rounds", type=positive, metavar="N", help="how often each variant is timed")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON to FILE after every row, or instead of the table"
    )


def _bench_layer(chosen: argparse.Namespace) -> None:
    from ..benchmark import layer

    layer.run(chosen.sizes, chosen.batch, device=chosen.device, rounds=chosen.rounds, json_to=chosen.json)


def _bench_attention(chosen: argparse.Namespace) -> None:
    from ..benchmark import attention

    attention.run(chosen.shapes, chosen.variants, device=chosen.device, rounds=chosen.rounds, json_to=chosen.json)


def _bench_model(chosen: argparse.Namespace) -> None:
    from ..benchmark import model

    both = chosen.train == chosen.infer
    wanted = {"infer": both or chosen.infer, "train": both or chosen.train}
    phases = [phase for phase in wanted if wanted[phase]]
    model.run(chosen.models, phases=phases, cpp_wrapper=chosen.cpp_wrapper, **_network(chosen))


def _bench_table2(chosen: argparse.Namespace) -> None:
    from ..benchmark import table2

    table2.run(**_network(chosen), complete=chosen.complete)


def _bench_train(chosen: argparse.Namespace) -> None:
    from ..benchmark import train

    train.run(
        chosen.model,
        data_dir=chosen.data_dir,
        batch=chosen.batch,
        images=chosen.images,
        compile_mode=chosen.compile,
        precision=chosen.precision,
        device=chosen.device,
        rounds=chosen.rounds,
        json_to=chosen.json,
    )


def _network(chosen: argparse.Namespace) -> dict[str, Any]:
    return {
        "batch": chosen.batch,
        "size": chosen.size,
        "compiled": chosen.compile,
        "device": chosen.device,
        "rounds": chosen.rounds,
        "json_to": chosen.json,
    }
