"""The figures: both formats, the paper's points, and labels that neither overlap nor leave the picture."""

import itertools
import json

import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation

from aaconv.cli.paper import PLOTS
from aaconv.paper.figures import FIGURES, save
from aaconv.paper.our_figures import OUR_FIGURES, receptive_field
from aaconv.utils.figures import STYLE


def drawn(kind):
    with rc_context(STYLE):
        figure = FIGURES[kind]()
        FigureCanvasAgg(figure).draw()
    return figure, figure.axes[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FIGURES)
def test_every_format_is_written_and_repeats(kind, tmp_path):
    png, svg, pdf = (save(kind, tmp_path / f"figure.{ending}") for ending in ("png", "svg", "pdf"))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert b"CreationDate" not in pdf.read_bytes()
    assert save(kind, tmp_path / "again.pdf").read_bytes() == pdf.read_bytes()
    text = svg.read_text()
    assert "<svg" in text
    assert "top-1 accuracy" in text
    assert save(kind, tmp_path / "again.svg").read_text() == text


@pytest.mark.parametrize("kind", FIGURES)
def test_labels_neither_overlap_nor_leave_the_picture(kind):
    figure, axes = drawn(kind)
    labels = [child for child in axes.get_children() if isinstance(child, Annotation) and child.get_text()]
    labels.append(axes._left_title)
    boxes = [label.get_window_extent() for label in labels]
    assert len(labels) >= 4
    for (one, box), (other, other_box) in itertools.combinations(zip(labels, boxes, strict=True), 2):
        assert not box.overlaps(other_box), (one.get_text(), other.get_text())
    for label, box in zip(labels, boxes, strict=True):
        assert figure.bbox.x0 <= box.x0, label.get_text()
        assert box.x1 <= figure.bbox.x1, label.get_text()
        assert figure.bbox.y0 <= box.y0, label.get_text()
        assert box.y1 <= figure.bbox.y1, label.get_text()


def test_lines_are_the_papers_values():
    _, axes = drawn("params")
    points = [line.get_xydata().tolist() for line in axes.lines]
    assert points[0] == [[21.8, 73.6], [25.6, 76.4], [44.5, 77.9], [60.2, 78.4]]
    assert points[2] == [[20.7, 74.7], [25.8, 77.7], [45.4, 78.7], [61.6, 79.1]]
    _, axes = drawn("ratios")
    assert axes.lines[0].get_xydata().tolist() == [[0.25, 77.7], [0.5, 77.3], [0.75, 76.7], [1.0, 73.9]]
    assert axes.lines[2].get_xydata().tolist() == [[0.1, 77.5], [1.0, 71.1]]


def test_our_runs_stand_beside_the_papers(nothing_recorded):
    runs = nothing_recorded / "results" / "imagenet"
    runs.mkdir(parents=True)
    (runs / "0.json").write_text(json.dumps({"model": "aa_resnet50", "top1": 77.0}))
    _, axes = drawn("flops")
    assert [line.get_xydata().tolist() for line in axes.lines][-1] == [[8.3, 77.0]]
    assert any("our runs" in text.get_text() for text in axes.texts)


def test_unknown_figures_and_formats_say_what_there_is(tmp_path):
    with pytest.raises(ValueError, match="unknown figure 'speed'; choose one of params"):
        save("speed", tmp_path / "figure.png")
    with pytest.raises(ValueError, match=r"must end in \.png, \.svg or \.pdf"):
        save("params", tmp_path / "figure.gif")


def keep(folder, dataset, model, options, values, epochs=80):
    place = folder / "results" / dataset
    place.mkdir(parents=True, exist_ok=True)
    for seed, top1 in enumerate(values):
        record = {"model": model, "options": options, "epochs": epochs, "seed": seed, "top1": top1}
        (place / f"{len(list(place.iterdir()))}.json").write_text(json.dumps(record))


def lines_of(axes):
    """Label -> points, of lines that have error bars."""
    return {bars.get_label(): bars.lines[0].get_xydata().tolist() for bars in axes.containers}


def test_the_ablation_is_drawn_over_the_ratio(nothing_recorded, tmp_path):
    with pytest.raises(ValueError, match=r"no results to draw yet; train and record them: .*'imagenette-ablation-\*'"):
        save("ablation", tmp_path / "figure.png")
    for ratio, values in ((0.5, (80.0, 82.0)), (0.25, (83.0, 84.0))):
        options = {"key_ratio": ratio, "value_ratio": ratio}
        keep(nothing_recorded, "imagenette160", "aa_resnet50", options, values)
        keep(nothing_recorded, "imagenette160", "aa_resnet50", options | {"position": "none"}, values[:1])
    keep(nothing_recorded, "imagenette160", "aa_resnet50", {"key_ratio": 0.5, "value_ratio": 0.5}, [10.0], epochs=2)
    keep(nothing_recorded, "imagenette160", "plain_resnet50", {}, (81.0, 82.0))
    with rc_context(STYLE):
        (axes,) = OUR_FIGURES["ablation"]().axes
    assert lines_of(axes) == {
        "relative positions (n = 2)": [[0.25, 83.5], [0.5, 81.0]],
        "no positions (n = 1)": [[0.25, 83.0], [0.5, 80.0]],
    }
    assert save("ablation", tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_distance_is_drawn_relative_to_the_receptive_field(nothing_recorded, tmp_path):
    with pytest.raises(ValueError, match=r"no results to draw yet; .*'shapes-distance-\*'"):
        save("distance", tmp_path / "figure.png")
    keep(nothing_recorded, "shapes-distance-6-part", "plain_small", {}, [50.0], epochs=5)
    with pytest.raises(ValueError, match=r"no results to draw yet; .*'shapes-distance-\*'"):
        save("distance", tmp_path / "figure.png")
    for distance, top1 in ((30, 75.0), (6, 99.0)):
        keep(nothing_recorded, f"shapes-distance-{distance}", "plain_small", {}, [top1, top1 - 1])
        keep(nothing_recorded, f"shapes-distance-{distance}-part", "plain_small", {}, [50.0])
        keep(nothing_recorded, f"shapes-distance-{distance}", "aa_small", {}, [100.0])
    keep(nothing_recorded, "shapes-distance-6", "plain_small", {}, [98.0], epochs=5)
    with rc_context(STYLE):
        (axes,) = OUR_FIGURES["distance"]().axes
    assert axes.get_title(loc="left") == "after 80 epochs"
    assert lines_of(axes) == {
        "convolutions only (n = 2)": [[0.4, 98.5], [2.0, 74.5]],
        "with attention (n = 1)": [[0.4, 100.0], [2.0, 100.0]],
    }
    runs = [marks.get_offsets().tolist() for marks in axes.collections if len(marks.get_offsets())]
    assert sorted(runs[0]) == [[0.4, 98.0], [0.4, 99.0], [2.0, 74.0], [2.0, 75.0]]
    keep(nothing_recorded, "shapes-distance-6", "se_small", {}, [97.0], epochs=5)
    with rc_context(STYLE):
        shorter, _ = OUR_FIGURES["distance"]().axes
    assert shorter.get_title(loc="left") == "after 5 epochs"
    assert lines_of(shorter) == {"convolutions only (n = 1)": [[0.4, 98.0]], "with SE (n = 1)": [[0.4, 97.0]]}
    assert [receptive_field(strides) for strides in ((2,), (2, 2), (2, 2, 1), (2, 2, 1, 1))] == [3, 7, 15, 23]


def test_one_network_is_drawn_in_each_of_its_lengths(nothing_recorded):
    for epochs in (3, 10):
        keep(nothing_recorded, "shapes-distance-6", "plain_small", {}, [98.0], epochs=epochs)
    with rc_context(STYLE):
        panels = OUR_FIGURES["distance"]().axes
    assert [axes.get_title(loc="left") for axes in panels] == ["after 3 epochs", "after 10 epochs"]


def test_the_command_knows_every_figure():
    assert sorted(PLOTS) == sorted(FIGURES | OUR_FIGURES)
