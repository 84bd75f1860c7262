"""The command `aaconv`: subcommands and their options, no logic; handlers import only what they need."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, NoReturn

from .version import __version__

PLOTS = ("params", "flops", "mnasnet-params", "mnasnet-flops", "ratios")
VARIANTS = ("triton", "sdpa", "eager", "compiled", "flex")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 2 after an error (one line on stderr), 130 after Ctrl-C."""
    with suppress(AttributeError):  # a replaced stdout may have no encoding
        sys.stdout.reconfigure(errors="replace")
    try:
        chosen = _parse(arguments)
        chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (| head): the interpreter must not try to flush again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("AACONV_DEBUG") == "1":
            raise
        print(f"aaconv: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors that suggest the nearest name."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"aaconv: error: {message}; see {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            what = action.metavar or action.dest
            raise argparse.ArgumentError(None, f"there is no {what} {value!r}{_nearest(value, names)}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    chosen, unknown = _command_line().parse_known_args(arguments)
    if unknown:
        option = unknown[0].partition("=")[0]
        known = [name for action in chosen.parser._actions for name in action.option_strings]
        hint = _nearest(option, known) if option.startswith("-") else ""
        chosen.parser.error(f"unexpected argument {unknown[0]!r}{hint}")
    return chosen


def _nearest(word: object, names: list[str]) -> str:
    near = get_close_matches(str(word), names, n=1)
    return f", did you mean {near[0]!r}?" if near else f"; choose one of {', '.join(names)}" if names else ""


def _command_line() -> _Parser:
    parser = _Parser(prog="aaconv", description="Attention augmented convolutions for PyTorch.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"aaconv {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="command", required=True)

    _add(commands, "demo", _demo, "train a small network with and without attention, on the CPU, in seconds")

    bench = _add(commands, "bench", None, "measure time and memory: layer, attention, model, table2")
    benches = bench.add_subparsers(title="benchmarks", dest="benchmark", metavar="benchmark", required=True)
    _add_layer(benches)
    _add_attention(benches)
    _add_model(benches)
    _add_table2(benches)

    cost = _add(commands, "cost", _cost, "parameters, FLOPs and map memory of a model", "aa_resnet50 --layers")
    cost.add_argument("model", help="a registered name; `aaconv models` lists them")
    cost.add_argument("--size", type=_positive, nargs="+", metavar="N", help="height and width, or one for both")
    cost.add_argument("--layers", action="store_true", help="layer by layer")
    cost.add_argument("--json", action="store_true", help="print JSON")

    models = _add(commands, "models", _models, "list the models with parameters and FLOPs", "'aa_*'")
    models.add_argument("pattern", nargs="?", default="*", help="a wildcard pattern or a part of the name")
    models.add_argument("--json", action="store_true", help="print JSON")

    table = _add(commands, "table", _table, "the paper's tables 1 to 9, cell by cell, with ours beside them", "3")
    table.add_argument("number", nargs="?", default="all", type=_table_number, metavar="N|all", help="default: all")
    table.add_argument("--json", action="store_true", help="print JSON")

    plot = _add(commands, "plot", _plot, "draw the paper's figures 1 and 3 to 6", "params -o figure1.svg")
    plot.add_argument("kind", choices=PLOTS, metavar="kind", help=", ".join(PLOTS))
    plot.add_argument("-o", "--output", metavar="FILE", help="a .png or .svg file; default: KIND.png")

    data = _add(commands, "data", None, "look at a data set: preview")
    _add_preview(data.add_subparsers(title="commands", dest="look", metavar="command", required=True))

    _add(commands, "doctor", _doctor, "what this machine can run, and which backend each model would take")
    return parser


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None] | None, help: str, example: str = ""
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.", allow_abbrev=False)
    if run is not None:
        parser.epilog = f"example: {parser.prog} {example}".rstrip()
        parser.set_defaults(run=run)
    parser.set_defaults(parser=parser)
    return parser


def _add_layer(benches: Any) -> None:
    layer = _add(benches, "layer", _bench_layer, "AAConv2d on every backend beside nn.Conv2d", "--sizes 32 --json")
    layer.add_argument("--sizes", type=_positive, nargs="+", default=[14, 28, 32], metavar="N", help="maps of N x N")
    layer.add_argument("--batch", type=_positive, default=8, metavar="N", help="default: 8")
    _add_common(layer)


def _add_attention(benches: Any) -> None:
    attention = _add(
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
    model = _add(
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
    _add_network(model)


def _add_table2(benches: Any) -> None:
    table2 = _add(
        benches,
        "table2",
        _bench_table2,
        "the latencies of the paper's table 2: SE, BAM, CBAM, GALA and AA on ResNet-50",
        "--json benchmarks/table2.json",
    )
    _add_network(table2)


def _add_preview(looks: Any) -> None:
    preview = _add(looks, "preview", _data_preview, "draw a sheet of examples", "shapes -o sheet.png")
    preview.add_argument("name", help="shapes, cifar10, cifar100, imagenet, folder/PATH, wds/PATH or hfds/NAME")
    preview.add_argument("-o", "--output", metavar="FILE", help="an image file; default: NAME.png")
    preview.add_argument("--data-dir", metavar="DIR", help="where the data lie")
    preview.add_argument(
        "--split", choices=("train", "test"), default="train", metavar="split", help="train (default) or test"
    )
    preview.add_argument("--count", type=_positive, default=24, metavar="N", help="examples, default: 24")
    preview.add_argument("--seed", type=_seed, default=0, metavar="N", help="chooses the examples, default: 0")


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=_positive, metavar="N", help="default: 128, on the processor 2")
    parser.add_argument("--size", type=_positive, default=224, metavar="N", help="images of N x N, default: 224")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), metavar="device", help="cuda or cpu; default: what is there"
    )
    parser.add_argument("--rounds", type=_positive, metavar="N", help="how often each variant is timed")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON to FILE after every row, or instead of the table"
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 0, got {text!r}")
    return int(text)


def _table_number(text: str) -> int | str:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 9 or 'all', got {text!r}")
    return text if text == "all" else int(text)


def _demo(chosen: argparse.Namespace) -> None:
    from .demo import run

    run()


def _bench_layer(chosen: argparse.Namespace) -> None:
    from .benchmark import layer

    layer.run(chosen.sizes, chosen.batch, device=chosen.device, rounds=chosen.rounds, json_to=chosen.json)


def _bench_attention(chosen: argparse.Namespace) -> None:
    from .benchmark import attention

    attention.run(chosen.shapes, chosen.variants, device=chosen.device, rounds=chosen.rounds, json_to=chosen.json)


def _bench_model(chosen: argparse.Namespace) -> None:
    from .benchmark import model

    both = chosen.train == chosen.infer
    wanted = {"infer": both or chosen.infer, "train": both or chosen.train}
    model.run(chosen.models, phases=[phase for phase in wanted if wanted[phase]], **_network(chosen))


def _bench_table2(chosen: argparse.Namespace) -> None:
    from .benchmark import table2

    table2.run(**_network(chosen))


def _network(chosen: argparse.Namespace) -> dict[str, Any]:
    return {
        "batch": chosen.batch,
        "size": chosen.size,
        "compiled": chosen.compile,
        "device": chosen.device,
        "rounds": chosen.rounds,
        "json_to": chosen.json,
    }


def _cost(chosen: argparse.Namespace) -> None:
    from .cost import print_cost

    size = None
    if chosen.size:
        if len(chosen.size) > 2:
            raise ValueError(f"--size takes height and width, or one for both, got {len(chosen.size)} numbers")
        size = (chosen.size[0], chosen.size[-1])
    print_cost(chosen.model, size, layers=chosen.layers, as_json=chosen.json)


def _models(chosen: argparse.Namespace) -> None:
    from .cost import print_models

    print_models(chosen.pattern, as_json=chosen.json)


def _table(chosen: argparse.Namespace) -> None:
    from .tables import print_tables

    print_tables(*([] if chosen.number == "all" else [[chosen.number]]), as_json=chosen.json)


def _plot(chosen: argparse.Namespace) -> None:
    from .plots import save

    print(f"drew {save(chosen.kind, chosen.output or f'{chosen.kind}.png')}")


def _data_preview(chosen: argparse.Namespace) -> None:
    from .data import preview

    path = chosen.output or f"{chosen.name.rstrip('/').rpartition('/')[2]}.png"
    preview.save(chosen.name, path, data_dir=chosen.data_dir, split=chosen.split, count=chosen.count, seed=chosen.seed)
    print(f"drew {path}")


def _doctor(chosen: argparse.Namespace) -> None:
    from .doctor import print_report

    print_report()
