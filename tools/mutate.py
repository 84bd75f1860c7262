"""Would the tests notice? Small changes of the source, one at a time, each against the tests of its file.

    make mutate                                     # 300 mutants, drawn with seed 0; about an hour on one core
    python tools/mutate.py --sample 50 --only 'layers/*'
    python tools/mutate.py --sample 0 --only detection/loss.py   # all of a file

A mutant is a comparison, an arithmetic or boolean operator, a condition, a number or a truth that is changed, or a
statement that is gone. It is killed where a test fails or takes far too long; what survives is printed with its line,
and wants a test, or the line is not needed. `mutate_equivalent.txt` lists mutants that change nothing a test could
see, with the reason: they are left out. Tests marked `slow` are asked only about mutants that the others let pass;
`browser`, `gpu` and `processes` never are. Nothing here is part of the tests themselves or of continuous integration.

Each mutant runs in a process forked from one that has torch imported, over a copy of src. General tools do not fit:
mutmut calls every function through one of its own, which breaks the tests that compile, trace or export; cosmic-ray
starts Python and imports torch anew for each of 400 mutants of a file of 80 lines.
"""

import argparse
import ast
import compileall
import fnmatch
import importlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).with_name("mutate_equivalent.txt")
PRELOADED = (
    "torch", "torch._dynamo", "torch._inductor", "torch.func", "torch.testing", "torchvision.transforms.v2", "timm",
    "numpy", "networkx", "PIL.Image", "safetensors.torch", "yaml", "rich", "matplotlib.figure", "hypothesis", "pytest",
)  # fmt: skip
"""What tests import besides the package: done once, and forked."""
LAYER = ("layers/test_aaconv.py", "layers/test_aaconv_in_torch.py", "layers/test_lazy.py")
ATTEND = ("attention/test_attend_2d.py", "attention/test_attend_decomposed.py", "attention/test_sdpa_derivatives.py")
LOADERS = ("data/test_loaders.py", "data/test_detection_loader.py")
TESTS: dict[str, tuple[str, ...]] = {
    "attention/__init__.py": ATTEND,
    "attention/decomposed.py": ATTEND,
    "attention/eager.py": ATTEND,
    "attention/heads.py": ATTEND,
    "attention/sdpa.py": ATTEND,
    "attention/torch_state.py": ("attention/test_torch_state.py", *ATTEND),
    "layers/aaconv.py": (*LAYER, "layers/test_convolution.py", "layers/test_tables.py"),
    "layers/channels.py": LAYER,
    "layers/convolution.py": ("layers/test_convolution.py", *LAYER),
    "layers/gates.py": ("layers/test_gates.py",),
    "layers/geometry.py": ("layers/test_geometry.py", "layers/test_aaconv.py"),
    "layers/lazy.py": LAYER,
    "layers/pointwise.py": ("layers/test_pointwise.py", *LAYER),
    "layers/pooling.py": ("layers/test_pooling.py", "layers/test_aaconv.py"),
    "layers/position.py": ("layers/test_position.py", "layers/test_aaconv.py"),
    "layers/tables.py": ("layers/test_tables.py", *LAYER),
    "training/checkpoint.py": ("training/test_checkpoint.py", "training/test_resume.py"),
    "utils/weights.py": ("training/test_checkpoint.py", "utils/test_weights.py"),
    "data/base_loader.py": LOADERS,
    "data/detection_loader.py": LOADERS,
    "data/loaders.py": LOADERS,
    "data/workers.py": LOADERS,
    "detection/anchors.py": ("models/test_aa_retinanet.py",),
    "detection/boxes.py": ("detection/test_boxes.py", "models/test_aa_retinanet.py"),
    "detection/loss.py": ("detection/test_loss.py", "models/test_aa_retinanet.py"),
}
"""Each file of the package that is changed, and the tests that are asked, the quickest first."""
QUICK, SLOW = "not slow and not browser and not gpu and not processes", "slow and not browser and not gpu"

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A file of the package with one change; `shown` is the line as it then reads, and tells it from the others."""

    file: str
    line: int
    shown: str
    source: str


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Every change of a file, in its order."""
    lines = source.splitlines(keepends=True)
    for node, text in sorted(_changes(ast.parse(source)), key=lambda change: (change[0].lineno, change[0].col_offset)):
        # Columns are counted in bytes.
        start, end = (
            len("".join(lines[: row - 1]).encode()) + column
            for row, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        )
        changed = source.encode()[:start] + text.encode() + source.encode()[end:]
        shown = changed.decode().splitlines()[node.lineno - 1].strip()
        if text == "pass":
            shown = f"removed: {lines[node.lineno - 1].strip()}"
        yield Mutant(file, node.lineno, shown, changed.decode())


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """(what is replaced, its new text). Annotations, messages and documentation stay as they are."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield from _changes_of(node)
        if isinstance(node, ast.Raise | ast.JoinedStr):
            continue
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                waiting += [part for part in (value if isinstance(value, list) else [value]) if _may_change(part)]


def _may_change(node: object) -> bool:
    is_type = isinstance(node, ast.Assign) and "TypeVar" in ast.unparse(node)
    return isinstance(node, ast.AST) and not is_type and not isinstance(node, ast.Import | ast.ImportFrom)


def _changes_of(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    match node:
        case ast.Compare(left, ops, others):
            for place, op in enumerate(ops):
                changed = [*ops[:place], COMPARED[type(op)](), *ops[place + 1 :]]
                yield node, f"({ast.unparse(ast.Compare(left, changed, others))})"
        case ast.BinOp(left, op, right) if type(op) in COMPUTED and not _is_union_of_types(node):
            yield node, f"({ast.unparse(ast.BinOp(left, COMPUTED[type(op)](), right))})"
        case ast.BoolOp(op, values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.Constant(bool() as value):
            yield node, str(not value)
        case ast.Constant(int() as value):
            yield node, str(value + 1)
        case ast.Constant(float() as value):
            yield node, repr(2 * value + 1)
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield node, "pass"
        case ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield node, "pass"
        case ast.If(test) | ast.IfExp(test) | ast.While(test) if isinstance(test, ast.Name | ast.Attribute | ast.Call):
            yield test, f"(not {ast.unparse(test)})"


def _is_union_of_types(node: ast.BinOp) -> bool:
    """`int | None`, outside of an annotation: a type's name, or None, stands on the right."""
    right = node.right
    is_none = isinstance(right, ast.Constant) and right.value is None
    name = getattr(right, "id", getattr(right, "attr", ""))
    return isinstance(node.op, ast.BitOr) and (is_none or name[:1].isupper() or name in ("int", "str", "float", "bool"))


def outcome(folder: Path, tests: tuple[str, ...], limit: float, *, quick: bool) -> str:
    """killed, timed out or survived: what the tests say of the package in `folder`; quick: without the slow ones."""
    for marks in (QUICK,) if quick else (QUICK, SLOW):
        process = multiprocessing.get_context("fork").Process(target=_test, args=(folder, tests, marks))
        process.start()
        process.join(limit)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return "timed out"
        if process.exitcode not in (0, 5):  # 5: there is no such test
            return "killed"
    return "survived"


def _test(folder: Path, tests: tuple[str, ...], marks: str) -> None:
    os.setsid()
    os.chdir(ROOT)
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    import pytest

    options = ["-x", "-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-m", marks]
    code = pytest.main([*options, *(f"tests/{test}" for test in tests)])
    ours = Path(sys.modules["aaconv"].__file__) if "aaconv" in sys.modules else folder
    os._exit(code if folder in ours.parents or ours == folder else 99)


def known_equivalents() -> set[tuple[str, str]]:
    """(file, line as it is shown) of what nobody could notice; the text behind the last " | " is the reason."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.is_file() else []
    parts = (line.split(" | ") for line in lines if line.strip() and not line.startswith("#"))
    return {(file, " | ".join(shown)) for file, *shown, _ in parts}


def draw(only: str, sample: int, seed: int) -> list[Mutant]:
    """A part of all mutants of the files that match, in their order; 0: all of them."""
    files = [file for file in TESTS if fnmatch.fnmatch(file, only)]
    found = [mutant for file in files for mutant in mutants_of(file, (ROOT / "src/aaconv" / file).read_text())]
    places = sorted(random.Random(seed).sample(range(len(found)), min(sample or len(found), len(found))))
    equivalent = known_equivalents()
    chosen = [found[place] for place in places if (found[place].file, found[place].shown) not in equivalent]
    left_out = len(places) - len(chosen)
    print(f"{len(chosen)} of {len(found)} mutants, seed {seed}; {left_out} more are known to be equivalent", flush=True)
    return chosen


def base_times(folder: Path, tests: set[str], *, quick: bool) -> dict[str, float]:
    """Seconds that each file of tests takes over the unchanged source; all of them have to pass."""
    seconds = {}
    for test in sorted(tests):
        start = time.monotonic()
        if outcome(folder, (test,), 900, quick=quick) != "survived":
            sys.exit(f"tests/{test} fails without any change")
        seconds[test] = time.monotonic() - start
        print(f"{seconds[test]:6.1f} s tests/{test}", flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="how many mutants; 0: all (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default 0)")
    parser.add_argument("--only", default="*", help="files of the package, as a pattern (default all)")
    parser.add_argument("--quick", action="store_true", help="ask no test that is marked slow")
    parser.add_argument("--list", action="store_true", help="list the mutants, and run nothing")
    args = parser.parse_args()
    mutants = draw(args.only, args.sample, args.seed)
    if args.list:
        print(*(f"{mutant.file}:{mutant.line}: {mutant.shown}" for mutant in mutants), sep="\n")
        return
    for name in PRELOADED:
        importlib.import_module(name)
    counts: dict[str, Counter] = {mutant.file: Counter() for mutant in mutants}
    survivors = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "src"
        shutil.copytree(ROOT / "src", folder, ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(folder, quiet=1)
        times = base_times(folder, {test for file in counts for test in TESTS[file]}, quick=args.quick)
        for mutant in mutants:
            path, tests = folder / "aaconv" / mutant.file, TESTS[mutant.file]
            path.write_text(mutant.source)
            word = outcome(folder, tests, 30 + 4 * sum(times[test] for test in tests), quick=args.quick)
            shutil.copy2(ROOT / "src/aaconv" / mutant.file, path)  # with its time, so that its bytecode fits again
            counts[mutant.file][word] += 1
            survivors += [mutant] if word == "survived" else []
            print(f"{word:9} {mutant.file}:{mutant.line}: {mutant.shown}", flush=True)
    print_summary(counts, survivors)


def print_summary(counts: dict[str, Counter], survivors: list[Mutant]) -> None:
    """A row per file, and what survived once more."""
    words = ("killed", "timed out", "survived")
    print(f"\n{'file':28}" + "".join(f"{word:>11}" for word in words) + f"{'noticed':>11}")
    total = sum(counts.values(), Counter())
    for name, found in (*counts.items(), ("all", total)):
        share = 1 - found["survived"] / found.total()
        print(f"{name:28}" + "".join(f"{found[word]:>11}" for word in words) + f"{share:>11.1%}")
    if survivors:
        print("\nsurvivors")
        print(*(f"{mutant.file}:{mutant.line}: {mutant.shown}" for mutant in survivors), sep="\n")


if __name__ == "__main__":
    main()
