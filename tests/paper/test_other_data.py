"""The networks of the paper's tables, and smaller ones, on data that the paper does not have."""

import json

from aaconv.paper.tables import print_tables
from support.kept_results import keep


def test_the_same_networks_on_other_data_stand_below_their_rows(nothing_recorded, capsys):
    """With interval and number; options that only fit the images are no other row, parts of the data no result."""
    rows = [
        *(
            ("imagenette160", "aa_resnet50", {"key_ratio": 0.5, "value_ratio": 0.5}, 80, seed, 80.0 + seed)
            for seed in (0, 1, 2)
        ),
        ("imagenette160", "aa_resnet50", {"key_ratio": 0.5, "value_ratio": 0.5}, 5, 0, 60.0),
        ("imagenette160-part", "plain_resnet50", {}, 80, 0, 99.0),
        ("tiny-imagenet", "plain_resnet50", {"stem_pool": False}, 60, 0, 55.5),
        ("tiny-imagenet", "aa_resnet50", {"stem_pool": False, "gate": "se"}, 60, 0, 56.5),
    ]
    for number, (dataset, model, options, epochs, seed, top1) in enumerate(rows):
        folder = nothing_recorded / "results" / dataset
        folder.mkdir(parents=True, exist_ok=True)
        record = {"model": model, "options": options, "epochs": epochs, "seed": seed, "top1": top1}
        (folder / f"{number}.json").write_text(json.dumps(record))
    print_tables([6])
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.partition("the same networks on other data")[2].splitlines()]
    assert lines[0] == ["paper's", "top-1", "tiny-imagenet,", "60", "epochs", "imagenette160,", "80", "epochs"]
    assert lines[1] == ["ResNet-50", "76.4", "55.50", "(1)"]
    assert lines[2] == ["kappa", "=", "upsilon", "=", "0.5", "77.3", "81.00", "±", "2.48", "(3)"]
    assert "99.0" not in printed
    print_tables([6], as_json=True)
    found = json.loads(capsys.readouterr().out)["on_other_data"]
    assert [(one["row"], one["dataset"], one["runs"]) for one in found] == [
        ("ResNet-50", "tiny-imagenet", 1),
        ("kappa = upsilon = 0.5", "imagenette160", 3),
    ]


def test_networks_that_were_trained_in_another_way_stand_in_another_column(tmp_path, capsys):
    """Without CutMix and with it; mixup, which one network alone has had, is left out."""
    for kind, top1 in (("plain", 50.0), ("aa", 52.0)):
        keep(tmp_path, f"tiny-imagenet-resnet50-{kind}", 0, top1, dataset="tiny-imagenet")
        for seed in range(2):
            keep(tmp_path, f"tiny-imagenet-resnet50-{kind}", seed, top1 + 5, dataset="tiny-imagenet", cutmix=1.0)
    keep(tmp_path, "tiny-imagenet-resnet50-aa", 0, 99.0, dataset="tiny-imagenet", mixup=1.0)
    print_tables([3], folder=tmp_path)
    printed = capsys.readouterr().out.partition("the same networks on other data")[2]
    title, *lines = printed.splitlines()[:3]
    assert title.split("  ")[2:4] == ["tiny-imagenet, 60 epochs", "tiny-imagenet, 60 epochs, --cutmix 1.0"]
    assert [line.split()[-6:] for line in lines] == [
        ["50.00", "(1)", "55.00", "±", "0.00", "(2)"],
        ["52.00", "(1)", "57.00", "±", "0.00", "(2)"],
    ]
    print_tables([3], as_json=True, folder=tmp_path)
    found = json.loads(capsys.readouterr().out)["on_other_data"]
    assert [(one["row"], one["column"].split(", ")[2:], one["runs"]) for one in found] == [
        ("ResNet-50", [], 1),
        ("ResNet-50", ["--cutmix 1.0"], 2),
        ("AA-ResNet-50", [], 1),
        ("AA-ResNet-50", ["--cutmix 1.0"], 2),
    ]


def test_smaller_networks_than_the_papers_stand_first_and_keep_no_column_of_others_away(tmp_path, capsys):
    for kind, top1 in (("plain", 59.0), ("se", 58.0), ("aa", 58.5)):
        keep(tmp_path, f"tiny-imagenet-resnet18-{kind}", 0, top1, dataset="tiny-imagenet", epochs=20)
    for kind, top1 in (("plain", 62.0), ("aa", 63.0)):
        keep(tmp_path, f"tiny-imagenet-resnet50-{kind}", 0, top1, dataset="tiny-imagenet", cutmix=1.0)
    print_tables([3], folder=tmp_path)
    title, *lines = capsys.readouterr().out.partition("the same networks on other data")[2].splitlines()[:7]
    columns = ["paper's top-1", "tiny-imagenet, 20 epochs", "tiny-imagenet, 60 epochs, --cutmix 1.0"]
    assert [word.strip() for word in title.split("  ") if word] == columns
    assert [line.split() for line in lines[:5]] == [
        ["ResNet-18", "59.00", "(1)"],
        ["SE-ResNet-18", "58.00", "(1)"],
        ["AA-ResNet-18", "58.50", "(1)"],
        ["ResNet-50", "76.4", "62.00", "(1)"],
        ["AA-ResNet-50", "77.7", "63.00", "(1)"],
    ]
    assert lines[5].endswith("; the paper has no ResNet-18, SE-ResNet-18, AA-ResNet-18")
    print_tables([6], folder=tmp_path)
    assert "ResNet-18" not in capsys.readouterr().out.partition("other data")[2]


def test_networks_of_other_epochs_do_not_stand_beside_each_other(nothing_recorded, capsys):
    folder = nothing_recorded / "results" / "imagenette160"
    folder.mkdir(parents=True)
    rows = [("plain", 80, 90.0), ("se", 80, 91.0), ("plain", 20, 70.0), ("aa", 20, 73.0), ("aa", 80, 92.0)]
    for number, (kind, epochs, top1) in enumerate(rows):
        record = {"model": f"{kind}_resnet50", "options": {}, "epochs": epochs, "seed": 0, "top1": top1}
        (folder / f"{number}.json").write_text(json.dumps(record))

    def printed():
        print_tables([3])
        _, _, text = capsys.readouterr().out.partition("the same networks on other data")
        return [line.split() for line in text.splitlines()]

    assert [line[-2] for line in printed()[1:4]] == ["90.00", "91.00", "92.00"]
    for number in (0, 1):
        (folder / f"{number}.json").unlink()
    lines = printed()
    assert lines[0][-3:] == ["imagenette160,", "20", "epochs"]
    assert [line[-2] for line in lines[1:3]] == ["70.00", "73.00"]
