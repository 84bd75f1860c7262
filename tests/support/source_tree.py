"""The package's source as a syntax tree: its files, and what each imports."""

import ast
from pathlib import Path

import aaconv

PACKAGE = Path(aaconv.__file__).parent


def modules():
    """Absolute name -> file, of every module of ours."""
    parts = {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(names).removesuffix(".__init__"): path for path, names in parts.items()}


def package_of(module, path):
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def imported_modules(source, package):
    """The absolute names of what the source imports, wherever the statement stands."""
    return names_imported_by(ast.walk(ast.parse(source)), package)


def imported_at_once(source, package):
    """The same of the statements that run when the module itself is imported."""
    return names_imported_by(ast.parse(source).body, package)


def names_imported_by(nodes, package):
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            # What is taken out of the package itself is a room.
            found |= {f"aaconv.{alias.name}" for alias in node.names} if module == "aaconv" else {module}
    return found
