"""What experiments gain on a recipe: on its runs that were trained in the same way, with an interval."""

import json

import pytest

from aaconv.paper.tables import print_runs_on
from aaconv.runs import results
from support.kept_results import keep


def test_what_experiments_gain_on_one_has_an_interval(tmp_path, capsys):
    """Equal variances and three runs each: Welch's degrees of freedom are Student's, four."""
    for recipe, first in (("plain", 70.0), ("13", 74.0), ("7", 72.0)):
        for seed in range(3):
            keep(tmp_path, f"imagenette-windows-{recipe}", seed, first + seed, dataset="imagenette160")
    keep(tmp_path, "imagenette-windows-global", 0, 71.5, dataset="imagenette160")
    keep(tmp_path, "imagenette-windows-global", 0, 90.0, dataset="imagenette160", epochs=40)
    print_runs_on("imagenette160", against="imagenette-windows-plain", folder=tmp_path)
    _, _, printed = capsys.readouterr().out.partition("against ")
    gained = [line.split() for line in printed.splitlines()[1:]]
    half = 2.7764451 * (2 / 3) ** 0.5
    assert gained[:3] == [
        ["imagenette-windows-global", "+0.50"],
        ["imagenette-windows-7", "+2.00", f"{2 - half:+.2f}", "to", f"{2 + half:+.2f}"],
        ["imagenette-windows-13", "+4.00", f"{4 - half:+.2f}", "to", f"{4 + half:+.2f}"],
    ]
    assert not any(line[:1] == ["imagenette-windows-global"] for line in gained[3:])  # of other epochs
    print_runs_on("imagenette160", against="imagenette-windows-plain", as_json=True, folder=tmp_path)
    (rows,) = json.loads(capsys.readouterr().out)["against"].values()
    assert [round(row["difference"], 6) for row in rows] == [0.5, 2.0, 4.0]
    assert rows[2]["interval"] == pytest.approx(half)
    with pytest.raises(ValueError, match=r"no runs of 'plain' on these data; there are some of imagenette"):
        print_runs_on("imagenette160", against="plain", folder=tmp_path)


def gained(folder, capsys, dataset, against):
    """[title of a comparison, its lines], and the notes below them."""
    print_runs_on(dataset, against=against, folder=folder)
    _, *parts = capsys.readouterr().out.split("\nagainst ")
    parts[-1], _, notes = parts[-1].partition("  differences of means, Welch's t\n")
    return [[line.rsplit("  ", 1)[0].split("  ")[0] for line in part.split("\n") if line] for part in parts], notes


def test_experiments_are_compared_with_runs_that_were_trained_alike(tmp_path, capsys):
    """With CutMix or without, wherever its options stand: in the recipe of one and in the changes of another."""
    for kind, top1 in (("plain", 50.0), ("se", 51.0), ("aa", 52.0)):
        keep(tmp_path, f"tiny-imagenet-resnet50-{kind}", 0, top1, dataset="tiny-imagenet")
        keep(tmp_path, f"tiny-imagenet-resnet50-{kind}", 0, top1 * 1.5, dataset="tiny-imagenet", cutmix=1.0)
    keep(tmp_path, "tiny-imagenet-resnet50-aa", 0, 58.0, dataset="tiny-imagenet", mixup=1.0)
    name = "tiny-imagenet-resnet50-plain"
    print_runs_on("tiny-imagenet", against=name, as_json=True, folder=tmp_path)
    (rows,) = json.loads(capsys.readouterr().out)["against"].values()
    found = {(row["recipe"][23:], *row["changes"]): row for row in rows}
    points = {("plain", "cutmix"): 25.0, ("se",): 1.0, ("aa",): 2.0, ("aa", "mixup"): 8.0}
    points |= {("se", "cutmix"): 1.5, ("aa", "cutmix"): 3.0}
    assert {key: row["difference"] for key, row in found.items()} == points
    assert found["aa", "cutmix"]["base_changes"] == {"cutmix": 1.0}
    otherwise = {key: row["trained_otherwise"] for key, row in found.items() if row["trained_otherwise"]}
    assert otherwise == {("plain", "cutmix"): {"cutmix": 1.0}, ("aa", "mixup"): {"mixup": 1.0}}
    (without, with_cutmix), notes = gained(tmp_path, capsys, "tiny-imagenet", name)
    assert (without[0], with_cutmix[0]) == (name, f"{name} --cutmix 1.0")
    assert without[1] == f"{name} --cutmix 1.0 1)"
    assert notes.split("\n")[:2] == ["  1) trained otherwise: --cutmix 1.0", "  2) trained otherwise: --mixup 1.0"]

    keep(tmp_path, "cifar100-wrn28-10-plain", 0, 77.5, epochs=60)
    keep(tmp_path, "cifar100-wrn28-10-plain", 0, 79.5, epochs=60, batch=256, weight_decay=5e-4)
    keep(tmp_path, "cifar100-wrn28-10-aa", 0, 78.5, epochs=60)
    print_runs_on("cifar100", against="cifar100-wrn28-10-plain", as_json=True, folder=tmp_path)
    (rows,) = json.loads(capsys.readouterr().out)["against"].values()
    points = [(row["recipe"], row["difference"]) for row in rows]
    assert points == [("cifar100-wrn28-10-plain", 2.0), ("cifar100-wrn28-10-aa", -1.0)]


def test_a_network_that_has_changed_is_compared_with_by_its_parameters(tmp_path, capsys):
    for number, (kind, parameters) in enumerate((("plain", 100), ("plain", 110), ("se", 120))):
        path = keep(tmp_path, f"cifar100-small-{kind}", 0, 70.0 + number)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"parameters": parameters}))
    compared, _ = gained(tmp_path, capsys, "cifar100", "cifar100-small-plain")
    assert compared == [
        ["cifar100-small-plain, 100 parameters", "cifar100-small-plain, 110 parameters", "cifar100-small-se"],
        ["cifar100-small-plain, 110 parameters", "cifar100-small-se"],
    ]


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.7062), (2, 4.3027), (2.5, 3.5747), (4, 2.7764), (30, 2.0423), (1000, 1.9623)]
)
def test_t_is_that_of_the_tables(freedom, t):
    assert results.t_95(freedom) == pytest.approx(t, abs=6e-5)
