"""The curves of runs: the values of metrics.csv, the paper's line, labels that can be read."""

import itertools
import json
from dataclasses import replace

import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Annotation

from aaconv import recipes
from aaconv.cli import main
from aaconv.recipes.diff import overrides_of
from aaconv.runs import curves
from aaconv.runs.record import record_result
from aaconv.utils.figures import BLUE, GREY, RED, STYLE
from support.tiny_runs import write_epochs

KINDS = ("plain", "se", "aa")


@pytest.fixture
def table1(tmp_path):
    """Three runs of table 1 that end close to each other."""
    ends = {"plain": 78.0, "se": 78.2, "aa": 78.4}
    return [
        write_epochs(tmp_path / kind, f"cifar100-wrn28-10-{kind}", [20.0 + 2 * i for i in range(30)] + [ends[kind]])
        for kind in KINDS
    ]


def drawn(runs):
    with rc_context(STYLE):
        figure = curves.figure(curves._read(runs))
        FigureCanvasAgg(figure).draw()
    return figure


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_every_format_is_written(ending, table1, tmp_path):
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert curves.draw(table1, tmp_path / f"c.{ending}").read_bytes().startswith(start[ending])


def test_lines_are_the_metrics(table1):
    loss, accuracy = drawn(table1[:1]).axes
    assert loss.lines[1].get_xydata().tolist() == [[epoch, 4 / epoch] for epoch in range(1, 32)]
    assert accuracy.lines[0].get_ydata().tolist() == [10.0 + epoch for epoch in range(1, 32)]
    assert accuracy.lines[1].get_ydata().tolist()[-1] == 78.0


def test_epochs_without_an_evaluation_are_left_out(tmp_path):
    run = write_epochs(tmp_path / "run", "demo-aa", [None, 60.0, None, 80.0])
    _, accuracy = drawn([run]).axes
    assert accuracy.lines[1].get_xydata().tolist() == [[2, 60.0], [4, 80.0]]
    assert accuracy.lines[0].get_xdata().tolist() == [1, 2, 3, 4]
    nothing = write_epochs(tmp_path / "nothing", "demo-aa", [None, None])
    assert len(drawn([nothing]).axes) == 1  # the training loss at least


def test_the_papers_value_is_a_line_in_the_colour_of_the_run(table1):
    _, accuracy = drawn(table1).axes
    lines = {line.get_ydata()[0]: to_hex(line.get_color()) for line in accuracy.lines if len(line.get_xdata()) == 2}
    assert lines == {80.3: GREY, 81.0: BLUE, 81.6: RED}
    assert any(text.get_text() == "81.6 in the paper, AA-Wide-ResNet" for text in accuracy.texts)


def test_no_paper_no_line(tmp_path):
    _, accuracy = drawn([write_epochs(tmp_path / "run", "demo-aa", [50.0, 60.0, 70.0])]).axes
    assert len(accuracy.lines) == 2
    assert not any("paper" in text.get_text() for text in accuracy.texts)


def test_images_held_out_are_named_and_have_no_value_in_the_paper(tmp_path):
    runs = [
        write_epochs(tmp_path / f"{seed}", "cifar100-wrn28-10-aa", [50.0, 60.0, 70.0 + seed], seed=seed, holdout=5000)
        for seed in range(2)
    ]
    assert [course.label for course in curves._read(runs)] == ["cifar100-wrn28-10-aa --holdout 5000 (2 seeds)"]
    assert not any("paper" in text.get_text() for text in drawn(runs).axes[1].texts)


def test_bands_stay_in_the_picture(tmp_path):
    start = [1.0, 2.0, *[60.0] * 22]
    runs = [write_epochs(tmp_path / f"{i}", "cifar100-small-aa", [*start, 70.0 - 30 * i], seed=i) for i in range(2)]
    assert drawn(runs).axes[1].get_ylim()[0] < 40


@pytest.mark.parametrize("many", [False, True])
def test_labels_neither_overlap_nor_leave_the_picture(table1, many, tmp_path):
    start = [20.0 + 2 * i for i in range(30)]
    others = [
        write_epochs(tmp_path / f"more-{i}", "cifar100-small-aa", [*start, 78.3 - 8 * (i == 0)], epochs=31 + i)
        for i in range(5 if many else 0)
    ]
    figure = drawn([*table1, *others])
    labels = [child for child in figure.axes[1].get_children() if isinstance(child, Annotation) and child.get_text()]
    assert len(labels) == 6 + len(others)
    boxes = [label.get_window_extent() for label in labels]
    for (one, box), (other, other_box) in itertools.combinations(zip(labels, boxes, strict=True), 2):
        assert not box.overlaps(other_box), (one.get_text(), other.get_text())
    for label, box in zip(labels, boxes, strict=True):
        assert figure.bbox.x0 <= box.x0, label.get_text()
        assert box.x1 <= figure.bbox.x1, label.get_text()
        assert box.y1 <= figure.bbox.y1, label.get_text()


def test_kinds_have_their_colours_and_a_second_one_another(table1, tmp_path):
    again = write_epochs(tmp_path / "more" / "aa", "cifar100-wrn28-10-aa", [1.0, 2.0])
    colours = [course.colour for course in curves._read([*table1, again])]
    assert colours[:3] == [GREY, BLUE, RED]
    assert colours[3] not in colours[:3]


def test_the_colour_of_a_kind_is_that_of_its_usual_network(tmp_path):
    runs = [write_epochs(tmp_path / name, f"cifar100-small-{name}", [1.0, 2.0]) for name in ("aa-no-position", "aa")]
    assert curves._read(runs)[1].colour == RED


def test_the_colour_of_a_kind_is_that_of_its_usual_recipe(tmp_path):
    runs = [
        write_epochs(tmp_path / str(batch), "demo-plain", [50.0, 60.0], batch=batch)
        for batch in (16, recipes.get("demo-plain").batch)
    ]
    assert curves._read(runs)[1].colour == GREY


def test_runs_of_the_same_name_are_told_apart(table1, tmp_path):
    again = write_epochs(tmp_path / "more" / "aa", "cifar100-wrn28-10-aa", [1.0, 2.0])
    assert [course.label for course in curves._read([table1[2], again])] == ["aa", "more/aa"]
    assert [course.label for course in curves._read([table1[0], table1[1]])] == ["plain", "se"]


def test_what_was_changed_in_some_is_told_and_what_in_all_is_not(tmp_path):
    changes = {
        "cifar100-wrn28-10-aa": {},
        "cifar100-wrn28-10-plain": {},
        "cifar100-wrn28-10-plain --batch 256": {"batch": 256},
        "cifar100-wrn28-10-se --batch 256": {"batch": 256},
    }
    runs = [
        write_epochs(tmp_path / f"{title} {seed}", title.split()[0], [50.0, 60.0], seed=seed, epochs=60, **changed)
        for title, changed in changes.items()
        for seed in range(2)
    ]
    assert [course.label for course in curves._read(runs)] == [f"{title} (2 seeds)" for title in changes]


@pytest.mark.parametrize("values", [[20.0, 80.0], [80.0, 50.0, 20.0], [50.0, 50.0]], ids=["top", "bottom", "level"])
@pytest.mark.parametrize("number", [8, 30])
def test_many_courses_leave_the_panels_their_height_and_other_texts_their_place(number, values, tmp_path):
    runs = [
        write_epochs(tmp_path / f"a-name-as-long-as-those-of-a-sweep-{i}", "demo-aa", values, batch=8 + i)
        for i in range(number)
    ]
    few, many = drawn(runs[:2]), drawn(runs)
    assert many.axes[1].bbox.height >= 0.9 * few.axes[1].bbox.height
    ends = [text.get_window_extent() for text in many.axes[1].texts if text.get_text() == f"{values[-1]:.2f}"]
    assert len(ends) == number
    assert max(end.y1 for end in ends) <= many.axes[1].bbox.y1 + 2  # the title is above
    assert min(end.y0 for end in ends) >= many.axes[1].bbox.y0 - 2  # the numbers of the axis are below
    for one, other in itertools.combinations(ends, 2):
        assert not one.overlaps(other)
    assert len({course.colour for course in curves._read(runs)}) >= min(number, 27)


def test_an_end_that_is_no_number_takes_no_place(tmp_path):
    runs = [
        write_epochs(tmp_path / f"{i}", "demo-aa", [40.0, value], batch=8 + i)
        for i, value in enumerate([50.0, 50.1, float("nan"), 50.05, 49.9, float("nan"), 50.2])
    ]
    places = {text.get_text(): text.get_window_extent().y0 for text in drawn(runs).axes[1].texts}
    assert sorted(places, key=places.get) == ["49.90", "50.00", "50.05", "50.10", "50.20"]


def test_the_papers_line_has_the_colour_of_the_recipe_nearest_to_the_papers(tmp_path):
    runs = [
        write_epochs(tmp_path / name, "cifar100-wrn28-10-plain", [50.0, 60.0], **changes)
        for name, changes in {"changed": {"batch": 256}, "usual": {}}.items()
    ]
    texts = {text.get_text(): to_hex(text.get_color()) for text in drawn(runs).axes[1].texts}
    assert texts["80.3 in the paper, Wide-ResNet"] == GREY


def test_a_long_name_is_set_in_lines(tmp_path):
    run = write_epochs(tmp_path / " ".join(["word"] * 40), "demo-aa", [50.0, 60.0])
    figure = drawn([run])
    box = figure.legends[0].get_window_extent()
    assert figure.bbox.x0 <= box.x0
    assert box.x1 <= figure.bbox.x1


def test_one_epoch_has_one_tick(tmp_path):
    loss, _ = drawn([write_epochs(tmp_path / "run", "demo-aa", [50.0])]).axes
    assert all(tick == int(tick) for tick in loss.get_xticks())


@pytest.fixture
def seeds(tmp_path):
    """Three seeds of one experiment, one of another."""
    runs = [
        write_epochs(tmp_path / f"small-{seed}", "cifar100-small-aa", [50.0, 60.0 + seed, 70.0 + seed], seed=seed)
        for seed in range(3)
    ]
    return [*runs, write_epochs(tmp_path / "longer", "cifar100-small-aa", [50.0, 55.0], epochs=100)]


def test_seeds_are_one_line_in_a_band(seeds):
    courses = curves._read(seeds)
    assert [course.label for course in courses] == ["cifar100-small-aa (3 seeds)", "longer"]
    _, accuracy = drawn(seeds[:3]).axes
    assert accuracy.lines[1].get_xydata().tolist() == [[1, 50.0], [2, 61.0], [3, 71.0]]
    (band,) = accuracy.collections
    edge = {tuple(point) for point in band.get_paths()[0].vertices.tolist()}
    assert edge == {(1, 50.0), (2, 60.0), (2, 62.0), (3, 70.0), (3, 72.0)}
    assert any(text.get_text() == "71.00 ± 1.00" for text in accuracy.texts)


def test_seeds_are_averaged_as_far_as_all_have_come(seeds, tmp_path):
    shorter = write_epochs(tmp_path / "begun", "cifar100-small-aa", [40.0], seed=7)
    (course,) = curves._read([*seeds[:3], shorter])
    assert course.points("top1") == ([1], [47.5])
    assert course.last("top1") == "47.50 ± 5.00"


def test_the_same_seed_twice_is_two_lines(seeds, tmp_path):
    again = write_epochs(tmp_path / "again", "cifar100-small-aa", [50.0, 60.0, 70.0], seed=1)
    assert [course.label for course in curves._read([seeds[1], again])] == ["small-1", "again"]


def record(run, folder):
    """Kept as if the run were finished; of the summary only what tells runs apart."""
    recipe = recipes.load(run / "recipe.yaml")
    summary = {"name": recipe.name, "model": recipe.model.name, "options": recipe.model.options}
    summary |= {"data": recipe.data, "seed": recipe.seed, "epochs": recipe.epochs, "finished": True}
    (run / "summary.json").write_text(json.dumps(summary | {"overrides": overrides_of(recipe)}))
    return record_result(run, folder)


def test_records_are_drawn_like_their_runs(seeds, tmp_path, capsys):
    records = [record(run, tmp_path / "kept") for run in seeds]
    first, second = curves._read(records)
    assert first.points("top1") == curves._read(seeds)[0].points("top1")
    assert first.recipe == recipes.load(seeds[0] / "recipe.yaml")
    assert [first.label, second.label] == ["cifar100-small-aa (3 seeds)", "cifar100-small-aa --epochs 100"]
    records[0].with_suffix(".csv").rename(tmp_path / "metrics.csv")
    assert main(["plot", *map(str, records), "-o", str(tmp_path / "c.png")]) == 2
    assert "seed0.json has no metrics beside it" in capsys.readouterr().err
    (tmp_path / "metrics.csv").rename(records[0].with_suffix(".csv"))
    records[0].write_text("[]")
    with pytest.raises(ValueError, match="not what `aaconv record` keeps"):
        curves.draw(records, tmp_path / "c.png")


def test_no_two_lines_have_the_same_label(seeds, tmp_path):
    kept, again = record(seeds[0], tmp_path / "kept"), record(seeds[0], tmp_path / "again")
    name = kept.name
    assert [course.label for course in curves._read([kept, again])] == ["cifar100-small-aa"]  # a copy is no other line
    again.with_suffix(".csv").write_text(kept.with_suffix(".csv").read_text().replace("0.0", "0.5"))
    assert [course.label for course in curves._read([kept, again])] == [
        f"cifar100-small-aa, kept/cifar100/{name}",
        f"cifar100-small-aa, again/cifar100/{name}",
    ]
    folder = seeds[0].rename(tmp_path / "cifar100-small-aa")
    labels = [course.label for course in curves._read([folder, kept])]
    assert labels == ["cifar100-small-aa", f"cifar100-small-aa, {name}"]


def test_recipes_of_one_name_that_the_catalogue_does_not_know_are_told_apart(tmp_path):
    runs = [
        write_epochs(tmp_path / f"{batch}-{seed}", "demo-aa", [50.0, 60.0], batch=batch, seed=seed)
        for batch in (16, 32)
        for seed in range(2)
    ]
    for run in runs:
        recipes.save(replace(recipes.load(run / "recipe.yaml"), name="mine"), run / "recipe.yaml")
    assert [course.label for course in curves._read(runs)] == ["mine --batch 16 (2 seeds)", "mine --batch 32 (2 seeds)"]


def test_what_is_named_twice_is_drawn_once(seeds):
    assert [course.label for course in curves._read([seeds[0], seeds[0], f"{seeds[0]}/"])] == ["small-0"]


def test_a_run_within_another_has_a_label_of_its_own(tmp_path):
    runs = [write_epochs(tmp_path / place, "demo-aa", [50.0, 60.0]) for place in ("a", "a/a")]
    assert [course.label for course in curves._read(runs)] == ["a", "a/a"]


def test_of_many_courses_only_the_tests_are_compared(tmp_path):
    names = ("plain", "se", "ge", "aa", "aa-per-head")
    runs = [write_epochs(tmp_path / name, f"cifar100-small-{name}", [30.0, 40.0, 50.0]) for name in names]
    assert len(drawn(runs).axes[1].lines) == 5
    assert len(drawn(runs[:4]).axes[1].lines) == 8


def test_what_cannot_be_drawn_is_named(tmp_path, table1):
    with pytest.raises(ValueError, match=r"must end in \.png"):
        curves.draw(table1, tmp_path / "c.gif")
    with pytest.raises(ValueError, match="is not a run folder"):
        curves.draw([tmp_path], tmp_path / "c.png")
    (table1[0] / "metrics.csv").unlink()
    with pytest.raises(ValueError, match="no finished epoch"):
        curves.draw(table1, tmp_path / "c.png")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        curves.draw(table1[1:], tmp_path / "none" / "c.png")


@pytest.mark.parametrize(("number", "epochs", "insets"), [(4, 40, 0), (5, 10, 0), (5, 40, 1)])
def test_the_last_quarter_of_many_long_runs_is_drawn_larger(number, epochs, insets, tmp_path):
    runs = [
        write_epochs(
            tmp_path / f"run{index}", "demo-aa", [50 + epoch / 2 + index / 10 for epoch in range(epochs)], seed=0
        )
        for index in range(number)
    ]
    _, accuracy = drawn(runs).axes
    assert len(accuracy.child_axes) == insets
    if insets:
        (inset,) = accuracy.child_axes
        assert inset.get_xlim() == (30, 40)
        low, high = inset.get_ylim()
        assert 64 < low < 64.5 < 69.9 < high < 70.5
        assert [line.get_color() for line in inset.lines] == [course.colour for course in curves._read(runs)]
