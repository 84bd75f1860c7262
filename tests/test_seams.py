"""Private names of torch, timm and torchvision stay behind one seam each."""

import ast
from pathlib import Path

import pytest

import aaconv

PACKAGE = Path(aaconv.__file__).parent
WATCHED = ["layers", "models", "cost", "recipes", "explore", "attention/sdpa.py"]
SEAMS = {
    "cost/dispatch.py": {"torch.utils._python_dispatch"},
    "models/timm_seam.py": {
        "timm.models._efficientnet_builder",
        "timm.models._features",
        "timm.models._registry",
        "timm.models._registry._deprecated_models",
    },
}
LIBRARIES = ("torch", "timm", "torchvision")


def private_names(source: str) -> set[str]:
    """Modules with a leading underscore that the source imports of the libraries, and such names it takes from them."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            private = [f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_")]
            names = [node.module, *private]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        for name in names:
            first, *rest = name.split(".")
            if first in LIBRARIES and any(part.startswith("_") and not part.startswith("__") for part in rest):
                found.add(name)
    return found


def watched_files() -> list[Path]:
    places = [PACKAGE / place for place in WATCHED]
    return [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]


@pytest.mark.parametrize("file", watched_files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_private_names_have_their_seam(file):
    allowed = SEAMS.get(str(file.relative_to(PACKAGE)), set())
    assert private_names(file.read_text(encoding="utf-8")) == allowed
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    assert all(name in text for name in allowed), "a seam says what it wraps"


@pytest.mark.parametrize(
    "planted",
    [
        "from timm.models._features import x",
        "import torch._dynamo",
        "from torch.nn import _reduction",
        "def f():\n    return torch._C._are_functorch_transforms_active()",
        "from torch.utils import _pytree",
    ],
)
def test_a_planted_name_is_seen(planted):
    assert private_names(planted)
    assert not private_names("from torch.utils.data import DataLoader\nimport torch.nn.functional as F\nself._x = 1")
