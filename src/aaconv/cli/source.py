"""Options that several commands share: which network, which weights, which device."""

from .parsing import Parser

SOURCE = "a run folder, or the name of a model"


def add_source(parser: Parser) -> None:
    parser.add_argument("source", metavar="RUN|MODEL", help=SOURCE)


def add_weights(parser: Parser) -> None:
    parser.add_argument("--weights", metavar="WHICH", help="of a run: last, best or ema; or a .safetensors file")
    parser.add_argument("--pretrained", action="store_true", help="of a model: its pretrained weights, ours or timm's")


def add_device(parser: Parser, condition: str = "") -> None:
    """`condition`: what the option depends on, at the beginning of its help."""
    help = f"{condition}cuda, cuda:1 or cpu; default: a GPU if there is one"
    parser.add_argument("--device", metavar="DEVICE", help=help)


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
