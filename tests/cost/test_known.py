"""The costs that are kept are those that counting gives now, and nothing has to be counted for what is printed."""

from dataclasses import asdict

import pytest
import timm

from aaconv.cost import count_named, known
from aaconv.models import list_models, pretrained_names
from aaconv.paper import recount
from aaconv.paper.cells import cells
from aaconv.recipes.paper import TABLES

STALE = "cost/known.json is out of date: `make costs` counts again"
SAMPLE = ("aa_small", "aa_wrn16_4", "plain_resnet18", "se_resnet18", "ge_wrn16_4", "aa_mnasnet_075")


def totals(cost):
    return {name: value for name, value in asdict(cost).items() if name != "layers"}


def assert_known(name, size=None, **options):
    kept = known.cost_of(name, size, **options)
    assert type(kept) is known.Totals, STALE
    assert totals(kept) == totals(count_named(name, size, **options)), STALE


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_counts_to_what_is_known(name):
    assert_known(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in list_models() if name not in SAMPLE])
def test_every_model_counts_to_what_is_known(name):
    assert_known(name)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "options"), list(recount.settings()))
def test_every_variant_counts_to_what_is_known(name, size, options):
    assert_known(name, size, **options)


def test_the_models_are_all_of_ours():
    assert known.known_models() == list_models(), STALE


def test_weights_are_described_as_timm_describes_them():
    ours = {name: timm.get_pretrained_cfg(name).description for name in pretrained_names()}
    assert known.pretrained() == ours
    assert "aa_wrn16_4" in ours


def test_tables_and_lists_are_printed_without_counting(monkeypatch):
    monkeypatch.setattr("aaconv.cost.counting.count", lambda *_, **__: pytest.fail("something was counted"))
    assert len(cells(tuple(TABLES))) > 93
    assert all(known.cost_of(name).params for name in list_models())


def test_another_size_or_option_is_counted():
    assert known.cost_of("aa_small", (16, 16)).flops == count_named("aa_small", (16, 16)).flops
    assert known.cost_of("aa_small", num_heads=2).attention[0].num_heads == 2
    assert known.cost_of("aa_small").attention[0].num_heads == 4


def test_what_is_written_is_read_again(tmp_path, monkeypatch):
    names = ["aa_small", "plain_small"]
    monkeypatch.setattr("aaconv.models.list_models", lambda: names)
    known.write([("aa_small", (32, 32), {"num_heads": 2})], tmp_path / "known.json")
    written = known.read(tmp_path / "known.json")
    assert [record["model"] for record in written["models"]] == names
    assert written["variants"][0]["options"] == {"num_heads": 2}
    assert written["models"] == [record for record in known.read()["models"] if record["model"] in names]
