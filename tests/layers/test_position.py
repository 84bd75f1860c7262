import pytest
import torch

from aaconv.layers.position import CoordConvPosition, SinusoidalPosition, make_position


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


@pytest.mark.parametrize(("channels", "of_rows"), [(8, 4), (7, 4), (3, 2), (2, 1), (1, 1)])
def test_the_first_half_of_the_waves_tells_the_row_and_the_second_the_column(channels, of_rows):
    """Of an odd number of channels the rows have one more."""
    waves = SinusoidalPosition().encode(torch.zeros(1, channels, 5, 6))[0]
    rows, columns = waves[:of_rows], waves[of_rows:]
    assert torch.equal(rows, rows[:, :, :1].expand_as(rows))
    assert torch.equal(columns, columns[:, :1].expand_as(columns))
    assert (rows.amax(1) > rows.amin(1)).all()
    assert (columns.amax(2) > columns.amin(2)).all()


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
