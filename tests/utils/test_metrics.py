"""Metrics by name and by title."""

from aaconv.recipes.paper import ACCURACY
from aaconv.utils.metrics import TITLES, metric_name, metric_title, telling


def test_titles_and_names_are_each_others_inverse():
    for name, title in TITLES.items():
        assert (metric_title(name), metric_name(title)) == (title, name)
    assert metric_title("loss") == metric_name("loss") == "loss"


def test_every_accuracy_of_the_paper_has_a_name_in_our_files():
    assert set(ACCURACY) <= set(TITLES.values())


def test_what_says_something_is_left():
    measured = {"loss": 1.0, "mAP": 12.0, "top5": 100.0, "top1": 81.0, "mAP50": None, "mAP75": "x"}
    assert list(telling(measured).items()) == [("top1", 81.0), ("mAP", 12.0)]
    assert telling({"top5": 99.98}) == {"top5": 99.98}
