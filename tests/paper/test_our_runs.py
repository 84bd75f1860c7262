"""Our own results in the tables of the paper: in their cells, below them, and behind them."""

import json
import shlex

import pytest

from aaconv import recipes
from aaconv.cli import command_line
from aaconv.cli.recipe_options import given, spell_out
from aaconv.paper.cells import cells
from aaconv.paper.tables import print_runs_on, print_tables
from aaconv.recipes import diff
from aaconv.runs import results
from support.kept_results import keep, leave_out


def test_measured_values_are_read_from_the_working_folder(nothing_recorded):
    runs = nothing_recorded / "results" / "cifar100"
    runs.mkdir(parents=True)
    for seed, top1 in enumerate((80.9, 81.1)):
        record = {"model": "se_wrn28_10", "top1": top1, "top5": 95.0, "seed": seed, "epochs": 200}
        (runs / f"{seed}.json").write_text(json.dumps(record))
    latencies = [
        {"model": name, "infer": {"graph_to_first": infer}, "train": {"graph_to_first": train}}
        for name, infer, train in (("plain_resnet50", 1.0, 1.0), ("bam_resnet50", 1.15, 1.5))
    ]
    (nothing_recorded / "benchmarks").mkdir()
    (nothing_recorded / "benchmarks" / "table2.json").write_text(json.dumps(latencies))

    found = {(cell.row, cell.column): cell for cell in cells([1, 2])}
    accuracy = found["SE-Wide-ResNet", "top-1"]
    assert (accuracy.ours, accuracy.match) == ("81.0", True)
    assert "the mean of 2 runs of 200 epochs" in accuracy.note
    assert found["SE-Wide-ResNet", "top-5"].match is False
    assert found["Wide-ResNet", "top-1"].ours is None
    assert (found["BAM", "infer"].ours, found["BAM", "train"].ours) == ("+15%", "+50%")
    assert found["BAM", "infer"].match is None


def test_the_packages_results_are_there_in_any_folder_and_ones_own_besides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = results.read()
    assert len(ours) > 30
    assert {cell.row for cell in cells([2]) if cell.column == "infer" and cell.ours} >= {"SE", "AA (upsilon = 0.25)"}
    keep(tmp_path / "results", "cifar100-small-aa", 77, 60.0)
    (mine,) = [record for record in results.read() if record not in ours]
    assert (mine["seed"], mine["file"]) == (77, "results/cifar100/0.json")
    assert [record["seed"] for record in results.read(tmp_path / "results")] == [77]


def test_a_folder_of_results_is_read_once(monkeypatch):
    ours = results.read()
    monkeypatch.chdir(results.RECORDED)
    assert results.read() == ours


def test_the_packages_results_are_found_by_a_pattern():
    found = results.fitting("cifar100/aa_wrn16_4-seed*")
    assert [path.name for path in found] == [f"aa_wrn16_4-seed{seed}.json" for seed in range(5)]
    assert results.fitting("results/cifar100/aa_wrn16_4-seed*.json") == found
    assert results.fitting("cifar100/nothing") == []


def test_measured_map_stands_in_tables_5_and_8(nothing_recorded):
    runs = nothing_recorded / "results" / "coco"
    runs.mkdir(parents=True)
    position = {"position": "none"}
    records = [
        {"model": "aa_retinanet_resnet50", "options": {}, "mAP": 38.17, "mAP50": 56.0, "mAP75": None, "epochs": 150},
        {"model": "aa_retinanet_resnet50", "options": position, "mAP": 37.0, "mAP50": 55.0, "mAP75": 40.2},
    ]
    for number, record in enumerate(records):
        (runs / f"{number}.json").write_text(json.dumps(record))
    found = {(cell.table, cell.row, cell.column): cell for cell in cells([5, 8]) if cell.column.startswith("mAP")}
    assert (found[5, "AA-ResNet-50", "mAP"].ours, found[5, "AA-ResNet-50", "mAP"].match) == ("38.2", True)
    assert found[5, "AA-ResNet-50", "mAP75"].ours is None  # nothing could compute it where it was trained
    assert found[8, "relative", "mAP50"].ours == "56.0"
    assert found[8, "none", "mAP"].ours == "37.0"
    assert found[8, "none", "mAP75"].match is True
    assert found[5, "ResNet-50", "mAP"].ours is None


def test_recipes_of_ones_own_are_told_apart_by_their_fields(tmp_path, capsys):
    for seed, batch in ((0, 64), (1, 64), (0, 128)):
        keep(tmp_path, "cifar100-small-aa", seed, 70.0 + batch / 64 + seed, batch=batch, called="mine")
    keep(tmp_path, "cifar100-small-aa", 0, 69.0, batch=128, called="yours")
    print_tables([1], folder=tmp_path)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    start = next(place for place, line in enumerate(lines) if line.startswith("our runs"))
    rows = [line.split() for line in lines[start + 1 : start + 4]]
    assert [row[:3] + row[5:6] for row in rows] == [
        ["mine", "1)", "2", "71.50"],
        ["mine", "2)", "1", "72.00"],
        ["yours", "2)", "1", "69.00"],
    ]
    notes = [line.strip() for line in lines[start + 5 : start + 7]]
    assert lines[start + 7] == ""
    for mark, (note, batch) in enumerate(zip(notes, (64, 128), strict=True), 1):
        assert note.startswith(f"{mark}) not in the catalogue: --batch {batch} ")
        assert "--weight-decay 0.0005" in note


def test_runs_stand_below_the_table_with_interval_and_command(tmp_path, capsys):
    for seed, top1 in enumerate((71.0, 72.0, 73.0)):
        keep(tmp_path, "cifar100-small-aa", seed, top1)
    keep(tmp_path, "cifar100-small-plain", 3, 70.5)
    changes = {"epochs": 60, "batch": 256, "model_options": {"num_heads": 4, "share_heads": False}}
    keep(tmp_path, "cifar100-wrn28-10-aa", 0, 79.5, epochs=60)
    keep(tmp_path, "cifar100-wrn28-10-aa", 0, 79.6, **changes)
    print_tables([1, 2], folder=tmp_path)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    start = next(place for place, line in enumerate(lines) if line.startswith("our runs"))
    rows = [line.split() for line in lines[start + 1 : start + 5]]
    assert rows == [
        ["cifar100-small-plain", "1)", "1", "60", "1.5", "70.50", "90.50"],
        ["cifar100-small-aa", "2)", "3", "60", "1.5", "72.00", "±", "2.48", "92.00", "±", "2.48"],
        ["cifar100-wrn28-10-aa", "3)", "1", "60", "1.5", "79.50", "81.6", "99.50", "95.2"],
        ["cifar100-wrn28-10-aa", "4)", "1", "60", "1.5", "79.60", "99.60"],
    ]
    commands = [
        "1) aaconv train cifar100-small-plain --seed 3",
        "2) aaconv train cifar100-small-aa --seed 0",
        "3) aaconv train cifar100-wrn28-10-aa --epochs 60 --seed 0",
        "4) aaconv train cifar100-wrn28-10-aa --model.num-heads 4 --model.share-heads false --epochs 60 --seed 0",
    ]
    assert [line.strip() for line in lines[start + 6 : start + 10]] == commands
    assert max(map(len, lines[start : start + 5])) <= 100
    assert sum(line.startswith("our runs") for line in lines) == 1  # none of table 2
    assert not any("✗" in line or "!=" in line for line in lines)  # 60 epochs are not to agree with 500


def test_runs_without_a_metric_are_not_counted_for_it(tmp_path, capsys):
    leave_out(keep(tmp_path, "cifar100-small-plain", 0, 71.0), "top1", "top5")
    keep(tmp_path, "cifar100-small-aa", 0, 70.0)
    leave_out(keep(tmp_path, "cifar100-small-aa", 1, 72.0), "top5")
    leave_out(keep(tmp_path, "cifar100-small-aa", 2, 71.0), "top1", "top5")
    print_tables([1], folder=tmp_path)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("cifar100-small")]
    assert rows == [
        ["cifar100-small-plain", "1)", "0", "60", "1.5"],
        ["cifar100-small-aa", "2)", "2", "60", "1.5", "71.00", "±", "12.71", "90.00", "(n", "=", "1)"],
    ]


def test_a_cell_is_of_the_experiment_with_the_most_values(tmp_path):
    for seed in range(3):
        path = keep(tmp_path, "cifar100-wrn28-10-plain", seed, 70.0, batch=256)
        leave_out(path, *["top1"] * (seed > 0))
    for seed in range(2):
        keep(tmp_path, "cifar100-wrn28-10-plain", seed, 75.0, batch=512)
    found = {(cell.row, cell.column): cell.exact for cell in cells([1], tmp_path)}
    assert (found["Wide-ResNet", "top-1"], found["Wide-ResNet", "top-5"]) == (75.0, 90.0)


def test_a_command_that_is_printed_gives_the_recipe_again(tmp_path):
    changes = {"epochs": 60, "lr": 0.1, "deterministic": True, "channels_last": False, "schedule": "step"}
    changes |= {"decay_epochs": (30.0, 50.0), "no_decay": ("*.qkv.weight", "*.rel_?")}
    changes |= {"model_options": {"position": "none"}}
    keep(tmp_path, "cifar100-wrn28-10-aa", 7, 79.5, **changes)
    (experiment,) = results.experiments(results.read(tmp_path))
    _, train, name, *options = shlex.split(experiment.command)
    chosen = command_line().parse_args([train, name, *spell_out(options)])
    wanted = recipes.override(recipes.get(name), changes | {"seed": 7})
    assert recipes.override(recipes.get(name), given(chosen)) == wanted


def test_an_option_of_a_list_may_be_given_twice():
    words = ["train", "demo-aa", "--no-decay", "*.rel_h", "--no-decay", "*.rel_w", "*.qkv.weight"]
    assert given(command_line().parse_args(words))["no_decay"] == ("*.rel_h", "*.rel_w", "*.qkv.weight")


def test_words_of_a_command_are_quoted():
    recipe = recipes.get("demo-aa")
    assert diff.options_of(recipe, {"data": "folder/my photos", "ema": None}) == [
        "--data 'folder/my photos'",
        "--ema none",
    ]


def test_runs_on_other_data_stand_behind_all_tables(tmp_path, capsys):
    keep(tmp_path, "imagenette-aa-resnet18", 0, 70.25, dataset="imagenette160")
    keep(tmp_path, "cifar100-small-aa", 0, 60.0, summary="in other words")  # the same experiment as the next
    keep(tmp_path, "cifar100-small-aa", 1, 62.0)
    print_tables(folder=tmp_path)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = lines.index(["our", "runs", "on", "imagenette160", "n", "epochs", "s", "/", "epoch", "top-1", "top-5"])
    assert lines[start + 1] == ["imagenette-aa-resnet18", "1)", "1", "80", "1.5", "70.25", "90.25"]
    print_tables(as_json=True, folder=tmp_path)
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["table"], one["dataset"], one["runs"]) for one in runs] == [
        (1, "cifar100", 2),
        (None, "imagenette160", 1),
    ]
    print_tables([1], folder=tmp_path)
    assert "imagenette" not in capsys.readouterr().out


def test_the_runs_on_one_data_set_have_the_interval_of_their_mean(tmp_path, capsys):
    for seed, top1 in enumerate((80.0, 81.0, 82.0)):
        keep(tmp_path, "imagenette-windows-13", seed, top1, dataset="imagenette160")
    keep(tmp_path, "imagenette-windows-plain", 0, 79.0, dataset="imagenette160")
    keep(tmp_path, "cifar100-small-aa", 1, 62.0)
    print_runs_on("imagenette160", folder=tmp_path)
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert lines[0][:3] == ["our", "runs", "on"]
    assert [line[0] for line in lines[1:3]] == ["imagenette-windows-plain", "imagenette-windows-13"]
    assert lines[2][2:8] == ["3", "20", "1.5", "81.00", "±", "2.48"]
    assert "mean ± 95 % interval of the mean; each command" in printed
    assert "aaconv train imagenette-windows-13 --seed 0" in printed
    assert "cifar100" not in printed
    print_runs_on("imagenette160", as_json=True, folder=tmp_path)
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["recipe"], one["seeds"]) for one in runs][1] == ("imagenette-windows-13", [0, 1, 2])


def test_data_without_results_are_named_with_those_that_have_some(tmp_path):
    with pytest.raises(ValueError, match=r"^there are no results on 'imagenette'; `aaconv record` keeps some$"):
        print_runs_on("imagenette", folder=tmp_path)
    keep(tmp_path, "cifar100-small-aa", 1, 62.0)
    with pytest.raises(ValueError, match=r"on 'cifar10'; a table is 1 to 9 or 'all', and our runs are on cifar100$"):
        print_runs_on("cifar10", folder=tmp_path)


def test_only_runs_of_one_kind_are_averaged(tmp_path):
    for seed, top1 in enumerate((78.0, 80.0)):
        keep(tmp_path, "cifar100-wrn28-10-plain", seed, top1, epochs=100)
    keep(tmp_path, "cifar100-wrn28-10-plain", 0, 70.0, epochs=60)
    keep(tmp_path, "cifar100-wrn28-10-plain", 5, 79.0, epochs=100, eval_every=10, workers=0)  # the same experiment
    found = {(cell.row, cell.column): cell for cell in cells([1], tmp_path)}
    cell = found["Wide-ResNet", "top-1"]
    assert (cell.exact, cell.match) == (79.0, None)
    about = "standard deviation 1.00, 95 % interval of the mean ± 2.48"
    assert cell.note == f"ours: the mean of 3 runs of 100 epochs, {about}"


def test_what_older_records_do_not_say_is_as_by_default(tmp_path):
    for seed, missing in enumerate((["seed"], ["options", "overrides"], ["epochs", "dataset"])):
        leave_out(keep(tmp_path, "cifar100-small-aa", seed, 70.0 + seed), *missing)
    leave_out(keep(tmp_path, "cifar100-small-aa", 4, 60.0, epochs=100), "epochs")
    first, longer = results.experiments(results.read(tmp_path))
    assert (first.seeds, first.epochs, longer.seeds, longer.epochs) == ([0, 1, 2], 60, [4], 100)


def test_a_copy_of_a_record_counts_once(tmp_path, caplog):
    path = keep(tmp_path, "cifar100-small-aa", 0, 70.0)
    (tmp_path / "cifar100" / "copy.json").write_text(json.dumps(json.loads(path.read_text()), indent=4))
    keep(tmp_path, "cifar100-small-aa", 1, 71.0)
    for _ in range(2):
        (experiment,) = results.experiments(results.read(tmp_path))
        assert experiment.values("top1") == [70.0, 71.0]
    assert caplog.messages == [f"{tmp_path}/cifar100/copy.json is left out: it is a copy of {path}"]


def test_two_runs_of_one_seed_are_both_counted_and_named(tmp_path, capsys):
    files = [keep(tmp_path, "cifar100-small-aa", seed, top1) for seed, top1 in ((0, 70.0), (0, 70.5), (1, 71.0))]
    print_tables([1], folder=tmp_path)
    printed = capsys.readouterr().out
    assert "70.50 ± 1.24" in printed
    assert f"cifar100-small-aa: n counts 2 different runs of seed 0: {files[0]}, {files[1]}; move away" in printed
    assert "of seed 1" not in printed


@pytest.mark.parametrize("content", ["{}", "[]", '{"top1": 70.0, "seed": 0}'])
def test_a_file_that_names_no_model_is_said_to_be_left_out(content, tmp_path, caplog):
    keep(tmp_path, "cifar100-small-aa", 0, 70.0)
    (tmp_path / "cifar100" / "other.json").write_text(content)
    assert len(results.read(tmp_path)) == 1
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"{tmp_path}/cifar100/other.json is left out: it names no model")


def test_a_cell_is_of_the_settings_nearest_to_the_papers_and_says_where_they_differ(tmp_path):
    keep(tmp_path, "cifar100-wrn28-10-plain", 0, 79.0, epochs=60, batch=256, weight_decay=5e-4)
    keep(tmp_path, "cifar100-wrn28-10-plain", 1, 79.0, epochs=60, batch=256, weight_decay=5e-4)
    keep(tmp_path, "cifar100-wrn28-10-se", 0, 80.0, epochs=60, batch=256)
    keep(tmp_path, "cifar100-wrn28-10-aa", 0, 78.0, epochs=60)
    found = {(cell.row, cell.column): cell for cell in cells([1], tmp_path)}
    assert found["SE-Wide-ResNet", "top-1"].note == "ours: 1 run of 60 epochs with --batch 256"
    assert found["AA-Wide-ResNet", "top-1"].note == "ours: 1 run of 60 epochs without share_heads=False"
    assert found["Wide-ResNet", "top-1"].exact == 79.0
    keep(tmp_path, "cifar100-wrn28-10-plain", 2, 77.0, epochs=60)
    cell = next(cell for cell in cells([1], tmp_path) if (cell.row, cell.column) == ("Wide-ResNet", "top-1"))
    other = "; 79.0 with --batch 256 --weight-decay 0.0005"  # as SE beside it was trained
    assert (cell.exact, cell.note) == (77.0, f"ours: 1 run of 60 epochs{other}")
    keep(tmp_path, "cifar100-wrn28-10-plain", 3, 60.0, epochs=30)
    assert cell in cells([1], tmp_path)


def test_runs_that_begin_as_the_papers_have_a_line_of_their_own(tmp_path, capsys):
    names = {cell.row for cell in cells([1], tmp_path)}
    for seed, top1 in enumerate((78.0, 79.0, 80.0)):
        keep(tmp_path, "cifar100-wrn28-10-aa-init-paper", seed, top1, epochs=200, nesterov=True)
    keep(tmp_path, "cifar100-wrn28-10-aa", 0, 70.0, epochs=200)
    found = {(cell.row, cell.column): cell for cell in cells([1], tmp_path)}
    begun, usual = found["AA-Wide-ResNet, init='paper'", "top-1"], found["AA-Wide-ResNet", "top-1"]
    assert {row for row, _ in found} == {*names, begun.row}
    assert (begun.exact, begun.paper, begun.match) == (79.0, "81.6", None)
    assert (usual.exact, usual.paper) == (70.0, "81.6")  # never averaged with the others
    assert "3 runs of 200 epochs with --nesterov, " in begun.note
    assert "95 % interval of the mean ± 2.48" in begun.note
    biases = 4 * sum(2 * 160 + 2 * values for values in (16, 32, 64))  # of queries, keys, values and the output
    assert f"biases in the projections, tables of deviation 1; {36_054_100 + biases:,} parameters" in begun.note
    keep(tmp_path, "cifar100-wrn28-10-aa", 0, 90.0, epochs=200, model_options={"init": "paper"})
    again = {(cell.row, cell.column): cell for cell in cells([1], tmp_path)}
    assert (again[begun.row, "top-1"].exact, again["AA-Wide-ResNet", "top-1"]) == (79.0, usual)
    assert again[begun.row, "top-1"].note.endswith("; 90.0 with --model.init paper")
    capsys.readouterr()
    print_tables([1], folder=tmp_path)
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith("AA-Wide-ResNet, init='paper'"))
    assert [word for word in row.split() if ")" not in word][2:] == ["81.6", "79.0", "95.2", "99.0"]
    assert "8 of 8 counted cells agree" in printed


def test_json_has_the_values_of_every_run(tmp_path, capsys):
    for seed in (4, 2):
        path = keep(tmp_path, "cifar100-small-se", seed, 70.0 + seed)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"parameters": 2_749_732, "train_loss": seed / 2}))
    print_tables([1], as_json=True, folder=tmp_path)
    (runs,) = json.loads(capsys.readouterr().out)["runs"]
    spread = {"deviation": pytest.approx(2**0.5), "interval": pytest.approx(12.7062047)}
    assert runs["top1"] == {"mean": 73.0, **spread, "values": [72.0, 74.0]}
    assert runs["train_loss"]["values"] == [1.0, 2.0]
    assert runs["parameters"] == 2_749_732
    assert (runs["recipe"], runs["seeds"], runs["table"]) == ("cifar100-small-se", [2, 4], 1)
    assert runs["command"] == "aaconv train cifar100-small-se --seed 2"


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("benchmarks/table2.json", "", r"benchmarks/table2\.json is not JSON"),
        ("benchmarks/table2.json", '{"rows": []}', r"not what `aaconv bench table2 --json benchmarks/table2\.json`"),
        ("benchmarks/table2.json", '[{"model": "plain_resnet50"}]', "not what `aaconv bench table2"),
        ("results/imagenet/0.json", "{", r"results/imagenet/0\.json is not JSON"),
        ("results/imagenet/0.json", '{"model": "aa_resnet50", "top1": "77"}', "record` keeps: 'top1' is '77'"),
        ("results/imagenet/0.json", '{"model": ["aa_resnet50"]}', "record` keeps: 'model' is"),
        ("results/imagenet/0.json", '{"model": "aa_resnet50", "overrides": [1]}', "record` keeps: 'overrides' is"),
    ],
)
def test_a_broken_file_of_results_is_named(file, content, told, nothing_recorded):
    (nothing_recorded / file).parent.mkdir(parents=True)
    (nothing_recorded / file).write_text(content)
    with pytest.raises(ValueError, match=told):
        cells([2])


def test_a_network_that_has_changed_is_another_experiment(nothing_recorded):
    """Of the same recipe, with other parameters: the network of today stands in the cell, the other one behind it."""
    runs = nothing_recorded / "results" / "cifar100"
    runs.mkdir(parents=True)
    today, before = 36_547_124, 36_538_148
    for seed, (parameters, top1) in enumerate([(before, 79.0), (before, 79.2), (today, 80.0)]):
        record = {"name": "cifar100-wrn28-10-se", "model": "se_wrn28_10", "top1": top1, "seed": seed % 2, "epochs": 500}
        (runs / f"{seed}.json").write_text(json.dumps(record | {"parameters": parameters}))
    cell = next(cell for cell in cells([1]) if (cell.row, cell.column) == ("SE-Wide-ResNet", "top-1"))
    assert cell.ours == "80.0"
    assert "parameters" not in cell.note
    (runs / "2.json").unlink()
    cell = next(cell for cell in cells([1]) if (cell.row, cell.column) == ("SE-Wide-ResNet", "top-1"))
    assert cell.ours == "79.1"
    assert f"that network had {before:,} parameters, today's has {today:,}" in cell.note
