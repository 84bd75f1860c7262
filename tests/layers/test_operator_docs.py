"""The examples of docs/operator.md run as they are printed, the large encoder in a small size."""

import re
from pathlib import Path

import pytest
import timm
import torch

PAGE = (Path(__file__).parents[2] / "docs/operator.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def small_encoder(monkeypatch):
    create = timm.create_model

    def small(name, pretrained=False, **options):
        return create(name, img_size=64, embed_dim=24, depth=12, num_heads=2, neck_chans=256, **options)

    monkeypatch.setattr(timm, "create_model", small)


@pytest.mark.usefixtures("small_encoder")
@pytest.mark.parametrize("example", EXAMPLES, ids=["accelerate", "attend_2d", "attend_decomposed", "fine-tuning"])
def test_an_example_runs(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = {"loader": [(torch.randn(1, 3, 64, 64), torch.ones(1, 1, 4, 4))] * 2}
    exec(example, found)
    if "out = " in example:
        assert list(found["out"].shape) == eval(re.search(r"out = .*# (\[.*\])", example)[1])
    else:
        assert "12 of 12" in capsys.readouterr().out
    if "loader" in example:
        weights = torch.load(tmp_path / "encoder.pt")
        timm.create_model("samvit_base_patch16", num_classes=0).load_state_dict(weights)
