"""The demo: its images hold what it says, and the command prints a result."""

import io

import pytest
import torch

from aaconv import demo


def _squares(images):
    """Which pixels are brighter than the noise, and the colour of the square in each half."""
    bright = images.amax(1) > 0.6
    half = demo.SIZE // 2
    weights = bright[:, None].float()
    colours = [(images * weights)[..., side].sum((2, 3)) for side in (slice(None, half), slice(half, None))]
    return bright, [(colour / demo.SQUARE**2).round() for colour in colours]


def test_label_says_whether_the_colours_are_the_same():
    images, same = demo.draw(64, torch.Generator().manual_seed(0))
    _, (left, right) = _squares(images)
    assert torch.equal((left == right).all(1), same == 1)
    assert 0 < same.sum() < 64


def test_no_window_of_the_convolutions_holds_both_squares():
    images, _ = demo.draw(256, torch.Generator().manual_seed(1))
    columns = _squares(images)[0].any(1)
    half = demo.SIZE // 2
    last_left = max(column for column in range(half) if columns[:, column].any())
    first_right = min(column for column in range(half, demo.SIZE) if columns[:, column].any())

    x = torch.zeros(1, 3, 41, 41, requires_grad=True)
    network = demo.small_network()[:3].eval()
    network(x + torch.randn_like(x))[0, :, 10, 10].sum().backward()
    window = int((x.grad != 0).any(0).any(0).any(0).sum())
    assert window == 11
    assert first_right - last_left + 1 > window


def test_demo_trains_both_networks_and_prints_them_side_by_side(capsys):
    accuracies = demo.run(steps=3)
    printed = capsys.readouterr().out
    assert list(accuracies) == ["convolutions", "convolutions + attention"]
    for name, accuracy in accuracies.items():
        assert 0.3 < accuracy < 0.8
        assert name in printed
        assert f"{accuracy:.1%}" in printed
    assert "\r" not in printed  # plain lines where it is not a terminal


def test_progress_is_rewritten_in_place_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdout", Terminal())
    with demo.Line("name") as line:
        line("half")
        line("done", last=True)
    text = demo.sys.stdout.getvalue()
    assert text.count("\r") == 2
    assert text.count("\n") == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_drawing_is_repeatable(seed):
    first, second = (demo.draw(4, torch.Generator().manual_seed(seed))[0] for _ in range(2))
    assert torch.equal(first, second)
