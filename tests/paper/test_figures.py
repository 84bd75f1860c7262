"""The figures: both formats, the paper's points, and labels that neither overlap nor leave the picture."""

import itertools
import json

import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation

from aaconv.paper.figures import FIGURES, save
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
