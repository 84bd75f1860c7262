"""Every cell of the paper: which agree, which cannot, and how they are printed."""

import json
from collections import Counter

import pytest
import timm

from aaconv.paper.cells import COUNTED, TRUE_GFLOPS, Cell, cells, compare
from aaconv.paper.tables import print_runs_on, print_tables
from aaconv.recipes.paper import TABLES

CANNOT_AGREE = {(4, "MnasNet-1.0", "GFlops"), (4, "MnasNet-1.4", "Params"), (6, "kappa = upsilon = 0.75", "GFlops")}


@pytest.fixture(scope="module")
def every_cell() -> list[Cell]:
    return cells()


def test_the_paper_has_93_counted_cells(every_cell):
    counted = Counter(cell.table for cell in every_cell if cell.column in COUNTED)
    assert counted == {1: 8, 2: 6, 3: 24, 4: 16, 5: 12, 6: 12, 9: 15}
    assert counted.total() == 93


def test_all_but_three_counted_cells_agree(every_cell):
    built = [cell for cell in every_cell if cell.column in COUNTED and cell.ours is not None]
    assert {(cell.table, cell.row, cell.column) for cell in built if not cell.match} == CANNOT_AGREE
    assert all("cannot agree" in cell.note for cell in built if not cell.match)


def test_no_counted_cell_is_empty(every_cell):
    for cell in every_cell:
        if cell.column in COUNTED:
            assert timm.is_model(cell.setting.partition(",")[0])
            assert None not in (cell.ours, cell.exact, cell.match)


def test_true_count_stands_beside_every_count_of_gflops(every_cell):
    gflops = {(cell.table, cell.row): cell.exact for cell in every_cell if cell.column == "GFlops" and cell.ours}
    true = {(cell.table, cell.row): cell.exact for cell in every_cell if cell.column == TRUE_GFLOPS}
    assert gflops.keys() == true.keys()
    attentional = {row for row in gflops if row[1].startswith(("AA", "kappa"))}
    assert all((true[row] > gflops[row]) == (row in attentional) for row in gflops)


def test_fitted_settings_carry_a_note(every_cell):
    fitted = [cell for cell in every_cell if cell.row.startswith("AA-Wide") and cell.column in COUNTED]
    assert all("share_heads=False" in cell.setting for cell in fitted)
    assert all("36,054,100 parameters and 11.054 GFlops" in cell.note for cell in fitted)


@pytest.mark.parametrize(
    ("paper", "exact", "unit", "ours", "match"),
    [
        ("8.3", 8_323_000_000, "G", "8.3", True),
        ("8.3", 8_350_000_000, "G", "8.4", False),
        ("0.70", 703_000_000, "G", "0.70", True),
        ("6.10M", 6_105_992, "", "6.11M", False),
        ("190k", 191_240, "", "190k", True),
        ("190k", 195_000, "", "200k", False),
        ("182", 182_450_000_000, "G", "182", True),
        ("37.5KB", 38_416, "", "37.5KB", True),
        ("600KB", 614_656, "", "600KB", True),
        ("+12%", 12.4, "", "+12%", True),
        ("+12%", -3.2, "", "-3%", False),
        ("77.5 (77.0)", 77.46, "", "77.5", True),
    ],
)
def test_agreement_is_to_the_printed_digits(paper, exact, unit, ours, match):
    assert compare(paper, exact, unit) == (ours, match)


def test_a_table_that_does_not_exist():
    with pytest.raises(ValueError, match="unknown table 10; the paper has tables 1 to 9"):
        cells([10])


@pytest.mark.usefixtures("nothing_recorded")
def test_json_is_the_list_of_cells(capsys):
    print_tables([1], as_json=True)
    printed = json.loads(capsys.readouterr().out)
    first, *rest = printed["cells"]
    assert list(first) == ["table", "row", "column", "paper", "ours", "exact", "match", "setting", "note"]
    assert (first["paper"], first["ours"], first["exact"], first["match"]) == ("36.3M", "36.3M", 36_278_324, True)
    assert len(rest) + 1 == 4 * (4 + 1)
    assert printed["runs"] == []


def test_printed_tables_hold_every_value_of_the_paper(capsys):
    print_tables()
    printed = capsys.readouterr().out
    assert "…" not in printed
    for table in TABLES.values():
        assert f"Table {table.number}  {table.title}" in printed
        for row in table.rows:
            lines = printed.split(f"Table {table.number} ")[1].splitlines()
            line = next(line for line in lines if line.startswith(row.name))
            assert all(value in line for value in row.cells.values())
    assert "{" not in printed.replace("{Stage", "")


def test_runs_of_detectors_show_map_by_the_size_of_objects(tmp_path, capsys):
    (tmp_path / "coco-small").mkdir()
    for seed, small in enumerate((1.5, 2.5)):
        record = {"model": "aa_retinanet_resnet50", "name": "mine", "seed": seed, "epochs": 20, "mAP": 9.0}
        record |= {"mAP_small": small, "mAP_medium": 12.25, "mAP_large": None}
        (tmp_path / "coco-small" / f"{seed}.json").write_text(json.dumps(record))
    print_runs_on("coco-small", folder=tmp_path)
    heading, line = capsys.readouterr().out.splitlines()[:2]
    assert [word for word in heading.split("  ") if "mAP" in word] == ["mAP", "mAP small", "mAP medium"]
    assert "2.00 ± 6.35" in line  # t at 97.5 % of one degree of freedom, 12.706, times the standard error of 0.5
    assert "12.25" in line
    print_runs_on("coco-small", as_json=True, folder=tmp_path)
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["mAP_small"]["values"] == [1.5, 2.5]
    assert "mAP_large" not in run
