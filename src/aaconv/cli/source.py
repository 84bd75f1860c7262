"""Options that several commands share: which network, which weights, which device."""

from typing import Any

from .parsing import Parser, parse_value

SOURCE = "a run folder, or the name of a model"


def add_source(parser: Parser) -> None:
    parser.add_argument("source", metavar="RUN|MODEL", help=SOURCE)


def add_weights(parser: Parser) -> None:
    parser.add_argument("--weights", metavar="WHICH", help="of a run: last, best or ema; or a .safetensors file")
    parser.add_argument("--pretrained", action="store_true", help="of a model: its pretrained weights, ours or timm's")


def add_augment(parser: Parser) -> None:
    help = "of a model: put attention into these convolutions, a wildcard pattern of names; more words are keywords"
    parser.add_argument("--augment", nargs="+", metavar=("WHERE", "KEYWORD=VALUE"), help=help)


def augmentation(words: list[str] | None) -> dict[str, Any] | None:
    """The keywords of aaconv.augment: `'layer4.*.conv2' num_heads=4` -> {"where": "layer4.*.conv2", "num_heads": 4}."""
    if words is None:
        return None
    where, *others = words
    keywords: dict[str, Any] = {"where": where}
    for word in others:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ValueError(
                f"behind --augment WHERE stand keywords such as num_heads=4, got {word!r}; name other things before it"
            )
        keywords[name.replace("-", "_")] = parse_value(value)
    return keywords


def add_device(parser: Parser, condition: str = "") -> None:
    """`condition`: what the option depends on, at the beginning of its help."""
    help = f"{condition}cuda, cuda:1 or cpu; default: a GPU if there is one"
    parser.add_argument("--device", metavar="DEVICE", help=help)


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
