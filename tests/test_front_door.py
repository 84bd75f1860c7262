"""`import aaconv`: what it gives, what it needs, and that timm knows our models without being imported for it."""

import ast
from pathlib import Path

import pytest

import aaconv
from support.fresh import run_fresh
from support.source_tree import imported_at_once, modules, package_of

BESIDES_TORCH = ("timm", "torchvision", "matplotlib", "rich", "yaml", "safetensors", "PIL", "huggingface_hub")

ATTEND = """
import torch
{imports}
qkv = torch.randn(1, 3, 4, 2 * 8 + 4)
print(*attend_2d(qkv, None, None, num_heads=2, key_channels=8).shape)
"""
LAYER = """
import torch
from aaconv import AAConv1d, AAConv2d, attention_channels, augment
net = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Conv2d(16, 96, 3, padding=1))
augment(net, 8, where="1")
print(*net(torch.randn(1, 3, 8, 8)).shape, *AAConv2d(8, 96, 3)(torch.randn(1, 8, 5, 5)).shape)
"""


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["from aaconv import attend_2d", "from aaconv.attention import attend_2d"])
def test_the_operator_needs_torch_alone(imports):
    assert run_fresh(ATTEND.format(imports=imports), absent=BESIDES_TORCH) == "1 3 4 4\n"


@pytest.mark.slow
def test_the_layers_need_torch_alone():
    assert run_fresh(LAYER, absent=BESIDES_TORCH) == "1 96 8 8 1 96 5 5\n"


def test_importing_the_package_imports_nothing():
    heavy = ("torch", *BESIDES_TORCH, "numpy")
    program = f"import sys, aaconv; print(*[name for name in {heavy} if name in sys.modules])"
    assert run_fresh(program) == "\n"


def test_every_public_name_is_there():
    for name in aaconv.__all__:
        assert getattr(aaconv, name) is not None
        assert name in dir(aaconv)
    with pytest.raises(AttributeError, match="module 'aaconv' has no attribute 'nothing'"):
        _ = aaconv.nothing


def test_editors_see_every_name_that_is_imported_late():
    body = ast.parse(Path(aaconv.__file__).read_text()).body
    (checked,) = [node for node in body if isinstance(node, ast.If)]
    names = {alias.name for node in checked.body for alias in node.names}
    assert names == set(aaconv.__all__) - {"__version__"} == {*aaconv._NAMES, *aaconv._ROOMS}


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import aaconv, timm",
        "import timm, aaconv",
        "import aaconv.attention, timm.data",
        "import aaconv.data, timm",  # it imports timm itself, while the package is not yet complete
        "import importlib.util, aaconv; importlib.util.find_spec('timm'); import timm",  # looked for, then imported
        "import aaconv; aaconv.list_models(); import timm",
    ],
)
def test_timm_knows_our_models(imports):
    program = f"""
{imports}
assert "aa_resnet50" in timm.list_models("aa_*")
print(type(timm.create_model("aa_small")).__name__)
"""
    assert run_fresh(program) == "SmallNet\n"


@pytest.mark.slow
def test_timm_is_imported_whole_where_our_models_cannot_be_registered():
    program = """
import warnings
import aaconv, sys
sys.modules["aaconv.models"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import timm
print(len(timm.list_models("resnet50")), *(w.message for w in caught if "aaconv" in str(w.message)))
"""
    assert run_fresh(program).startswith("1 the models of aaconv are not registered with timm: ")


def modules_that_models_import():
    """Of ours, outside their room: what is imported when they are."""
    files = modules()
    found, waiting = set(), [name for name in files if name.startswith("aaconv.models")]
    while waiting:
        name = waiting.pop()
        imported = imported_at_once(files[name].read_text(encoding="utf-8"), package_of(name, files[name]))
        for parts in (module.split(".") for module in imported):
            new = {".".join(parts[:end]) for end in range(2, len(parts) + 1)} & files.keys() - found
            found |= new
            waiting += new
    return {name: files[name] for name in found if not name.startswith("aaconv.models")}


def test_what_the_models_are_made_of_does_not_import_timm():
    """Else timm's import would register models that need modules which are still waiting for it."""
    found = modules_that_models_import()
    assert {"aaconv.attention", "aaconv.layers.augment", "aaconv.detection.anchors"} <= found.keys()
    for name, path in found.items():
        imported = imported_at_once(path.read_text(encoding="utf-8"), package_of(name, path))
        assert "timm" not in {module.split(".")[0] for module in imported}, name
