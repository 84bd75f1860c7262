import pytest
import torch

from aaconv.layers.position import CoordConvPosition, SinusoidalPosition, fit_table, make_position


@pytest.mark.parametrize("longest", [1, 2, 7, 14])
@pytest.mark.parametrize("heads", [(), (3,)])
def test_a_smaller_map_uses_the_middle_of_the_table_exactly(longest, heads):
    table = torch.randn(*heads, 2 * longest - 1, 5)
    for length in range(1, longest + 1):
        fitted = fit_table(table, length)
        for offset in range(-(length - 1), length):
            assert torch.equal(fitted[..., offset + length - 1, :], table[..., offset + longest - 1, :])


def test_the_expression_for_export_equals_the_slice_bit_for_bit(monkeypatch):
    table = torch.randn(27, 5)
    sliced = [fit_table(table, length) for length in range(1, 15)]
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    for length, expected in enumerate(sliced, 1):
        assert torch.equal(fit_table(table, length), expected)


@pytest.mark.parametrize(("longest", "length"), [(7, 14), (7, 8), (14, 40), (2, 9)])
def test_a_larger_map_stretches_the_table_smoothly(longest, length):
    offsets = torch.arange(-(longest - 1), longest, dtype=torch.float64)
    line = torch.stack([offsets, torch.ones_like(offsets)], -1)
    fitted = fit_table(line, length)
    assert fitted.shape == (2 * length - 1, 2)
    # The ends and the middle stay, a constant stays constant, and a line stays a line away from the ends.
    torch.testing.assert_close(fitted[[0, length - 1, -1], 0], torch.tensor([1 - longest, 0, longest - 1]).double())
    torch.testing.assert_close(fitted[:, 1], torch.ones(2 * length - 1).double())
    stretched = torch.linspace(1 - longest, longest - 1, 2 * length - 1, dtype=torch.float64)
    inner = (stretched.abs() <= longest - 2) | (stretched.abs() == longest - 1)
    torch.testing.assert_close(fitted[inner, 0], stretched[inner])
    assert (fitted[1:, 0] > fitted[:-1, 0]).all()


def test_a_single_entry_serves_any_length():
    table = torch.randn(1, 4)
    assert torch.equal(fit_table(table, 5), table.expand(9, 4))


@pytest.mark.parametrize(("channels", "height", "width"), [(8, 4, 6), (7, 3, 5), (1, 2, 2), (64, 1, 1)])
def test_sine_waves_tell_every_pixel_apart(channels, height, width):
    waves = SinusoidalPosition().encode(torch.zeros(1, channels, height, width))
    assert waves.shape == (1, channels, height, width)
    if channels > 3:
        flat = waves[0].flatten(1).T
        distance = torch.cdist(flat, flat) + 9 * torch.eye(height * width)
        assert distance.min() > 1e-2


def test_sine_waves_are_those_of_the_transformer():
    waves = SinusoidalPosition().encode(torch.zeros(1, 8, 3, 5))[0]
    assert waves[0, 2, 4].item() == pytest.approx(torch.tensor(2.0).sin().item())
    assert waves[1, 2, 4].item() == pytest.approx(torch.tensor(2.0 / 100).sin().item())
    assert waves[2, 2, 4].item() == pytest.approx(torch.tensor(2.0).cos().item())
    assert waves[4, 2, 4].item() == pytest.approx(torch.tensor(4.0).sin().item())


def test_coordinates_run_from_minus_one_to_one():
    x = torch.randn(2, 3, 3, 5)
    marked = CoordConvPosition().encode(x)
    assert torch.equal(marked[:, :3], x)
    torch.testing.assert_close(marked[0, 3, 0], torch.tensor([-1, -0.5, 0, 0.5, 1]))
    torch.testing.assert_close(marked[1, 4, :, 0], torch.tensor([-1.0, 0, 1]))
    torch.testing.assert_close(marked[0, 5], (marked[0, 3] ** 2 + marked[0, 4] ** 2).sqrt())
    assert CoordConvPosition().encode(torch.zeros(1, 1, 1, 1))[0, 1:].abs().max() == 0


def test_an_unknown_position_is_named():
    with pytest.raises(ValueError, match="one of relative, none, sinusoidal, coordconv, got position='absolute'"):
        make_position("absolute")
