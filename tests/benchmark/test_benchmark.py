"""The benchmarks: what they measure is right, and what goes wrong in one variant does not cost the others."""

import json
import os
import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from aaconv.attention import eager
from aaconv.attention.windows import make_window
from aaconv.benchmark import attention, kernels, layer, measure, model, table2
from aaconv.benchmark.measure import (
    Timing,
    compile_apart,
    failures_into,
    peak_memory,
    time_interleaved,
)
from aaconv.benchmark.output import Results, write_json
from aaconv.utils.environment import environment

CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def test_rounds_are_interleaved():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = time_interleaved(calls, CPU, rounds=4, sample_ms=0)
    assert "".join(order).endswith("abc" * 4)
    assert timings.keys() == calls.keys()


def test_on_a_gpu_the_first_call_of_a_turn_is_not_timed(monkeypatch):
    turn = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            turn.append("event")

        def synchronize(self):
            pass

        def elapsed_time(self, after):
            return 6.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: turn.clear())
    assert measure._sample(lambda: turn.append("call"), torch.device("cuda"), 3) == 2
    assert turn == ["call", "event", "call", "call", "call", "event"]


def test_percentiles_of_known_samples():
    assert Timing.of([float(n) for n in range(11)]) == Timing(2.0, 5.0, 8.0)
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0)


def test_time_is_that_of_one_call():
    """Sleeps, which a busy machine can only make a little longer: ten of them undivided would be 200 ms."""
    once = time_interleaved({"x": lambda: time.sleep(0.02)}, CPU, rounds=3)["x"].p20
    inside = time_interleaved({"x": lambda: [time.sleep(0.02) for _ in range(10)]}, CPU, rounds=3, inside=10)["x"].p20
    assert 20 <= once < 150
    assert 20 <= inside < 150


def test_no_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds=0"):
        time_interleaved({"x": lambda: None}, CPU, rounds=0)


@pytest.mark.parametrize("mib", [1, 16])
def test_peak_memory_is_what_was_alive_at_once(mib):
    n, kept = mib * 2**20, torch.zeros(2**20, dtype=torch.uint8)

    def two_of_three_alive():
        first = torch.zeros(n, dtype=torch.uint8)
        second = torch.zeros(n, dtype=torch.uint8)
        del first
        third = torch.zeros(n, dtype=torch.uint8)
        return second, third

    measured = peak_memory(two_of_three_alive, CPU, [kept, kept])
    assert measured == pytest.approx(2 * n + kept.nbytes, abs=1024)


def test_peak_memory_sees_the_maps_of_the_eager_backend():
    shape = attention.Shape.parse("1:16x16:20/3")
    inputs, grad_out = attention._inputs(shape, CPU, torch.float32, positions=True)
    sizes = {"num_heads": 8, "key_channels": 160}
    _, both = attention._phases(eager.attend, inputs, grad_out, sizes)
    assert peak_memory(both, CPU) > 2 * 8 * 256**2 * 4


def test_functions_compiled_apart_do_not_share_code():
    def make(factor):
        def scale(x):
            return x * factor

        return compile_apart(scale, fullgraph=True, backend="eager")

    with torch._dynamo.config.patch(error_on_recompile=True):
        for factor in range(3):
            assert make(factor)(torch.ones(3)).eq(factor).all()


def test_functions_compiled_apart_keep_their_defaults():
    def scale(x, by=2, *, plus=1):
        return x * by + plus

    assert compile_apart(scale, fullgraph=True, backend="eager")(torch.ones(3)).eq(3).all()


def test_a_failure_becomes_a_reason():
    failures = {}
    with failures_into(failures, "a"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried ...")
    with failures_into(failures, "b"):
        raise RuntimeError("first line\nsecond line")
    with failures_into(failures, "c"):
        pass
    assert failures == {"a": "out of memory", "b": "RuntimeError: first line"}
    with failures_into(failures, "d"):
        torch._assert(False, "")  # as networks of timm check their sizes
    assert re.fullmatch(r"AssertionError, no reason given, at line \d+ of test_benchmark.py", failures["d"])


def test_environment_names_versions():
    found = environment(CPU)
    assert found["torch"].startswith(torch.__version__.partition("+")[0])
    assert {"aaconv", "commit", "python", "triton", "timm", "device", "date"} <= found.keys()


def test_json_replaces_the_file_whole(tmp_path):
    path = tmp_path / "result.json"
    write_json([1], path)
    with pytest.raises(TypeError):
        write_json(object(), path)
    assert json.loads(path.read_text()) == [1]
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_a_path_that_cannot_be_written_is_found_out_first(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Results("layer", CPU, str(tmp_path / "file" / "result.json"))
    Results("layer", CPU, str(tmp_path / "result.json"))
    assert [file.name for file in tmp_path.iterdir()] == ["file"]  # no empty result for others to read


def test_links_and_devices_stay_what_they_are(tmp_path):
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to("result.json")
    write_json([1], link)
    assert link.is_symlink()
    assert json.loads((tmp_path / "result.json").read_text()) == [1]
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json([2], pipe)
    assert json.loads(os.read(reader, 100)) == [2]
    os.close(reader)
    assert pipe.is_fifo()


def test_old_results_stay_until_there_are_new_ones(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")
    results = Results("layer", CPU, str(path))
    assert path.read_text() == "old"
    results.add({"new": 1})
    assert json.loads(path.read_text())["rows"] == [{"new": 1}]


@pytest.mark.slow
def test_layer_measures_every_backend(tmp_path, capsys):
    layer.run([6], 1, device="cpu", rounds=2, json_to=str(tmp_path / "layer.json"))
    rows = {row["layer"]: row for row in json.loads((tmp_path / "layer.json").read_text())["rows"]}
    assert rows["eager"]["time_to_eager"] == rows["eager"]["memory_to_eager"] == 1
    assert rows["conv2d"]["peak_bytes"] < rows["eager"]["peak_bytes"]
    assert rows["sdpa"]["ms"]["p20"] <= rows["sdpa"]["ms"]["p50"] <= rows["sdpa"]["ms"]["p80"]
    printed = capsys.readouterr().out
    assert "sdpa" in printed
    assert "6 x 6" in printed


@pytest.mark.parametrize("text", ["14x14", "1:14x14:20", "0:3x3:4/4", "1:3x3:4/4x"])
def test_a_wrong_shape_is_explained(text):
    with pytest.raises(ValueError, match="128:14x14:20/3"):
        attention.Shape.parse(text)


def test_shapes_are_those_of_the_papers_models():
    assert len(attention.PAPER_SHAPES) == len(set(attention.PAPER_SHAPES)) == 10
    for shape in attention.PAPER_SHAPES:
        assert attention.Shape.parse(str(shape)) == shape


def test_floors_by_hand():
    floors = attention.Shape(128, 32, 32, 20, 2).floors(itemsize=2)
    assert floors["forward"]["exponentials_ms"] == pytest.approx(1e3 * 128 * 8 * 1024**2 / (16 * 132 * 1.755e9))
    assert floors["forward"]["bytes_ms"] == pytest.approx(1e3 * 128 * 1024 * 8 * (42 + 2) * 2 / 4.3e12)
    assert floors["both"]["bytes_ms"] > 2 * floors["forward"]["bytes_ms"]


@pytest.mark.slow
@without_gpu
def test_attention_goes_on_after_a_variant_that_cannot_run(tmp_path):
    path = tmp_path / "attention.json"
    names = ["eager", "triton", "sdpa"]
    attention.run(["1:3x4:20/3"], names, device="cpu", rounds=2, json_to=str(path))
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    assert "cuda" in rows["triton"]["failed"]
    assert rows["eager"]["to_first"] == 1
    assert rows["sdpa"]["both_ms"]["p50"] > 0


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_variant_of_windows_is_the_same_equation():
    shape = attention.Shape.parse("2:9x7:20/3@5")
    assert (str(shape), shape.window) == ("2:9x7:20/3@5", 5)
    inputs, _ = attention._inputs(shape, CPU, torch.float32, positions=True)
    sizes = {"num_heads": 8, "key_channels": 160}
    window = make_window(5)
    blocks = attention.neighbourhood(window, 9, 7, CPU)
    found = attention.flex_attend_windows(*inputs, **sizes, window=window, blocks=blocks)
    torch.testing.assert_close(found, eager.attend(*inputs, **sizes, window=window), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_variant_is_the_same_equation():
    inputs, _ = attention._inputs(attention.Shape.parse("2:5x3:20/3"), CPU, torch.float32, positions=True)
    sizes = {"num_heads": 8, "key_channels": 160}
    expected = eager.attend(*inputs, **sizes)
    torch.testing.assert_close(attention.flex_attend(*inputs, **sizes), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(attention.flex_attend(inputs[0], *(0 * t for t in inputs[1:]), **sizes), expected)


def test_options_of_a_network():
    network = model.Network.parse("aa_resnet50:key_ratio=0.25,num_heads=4,position=none,share_heads=False")
    assert network.options == {"key_ratio": 0.25, "num_heads": 4, "position": "none", "share_heads": False}
    assert model.Network.parse(str(network)) == network
    listed = model.Network.parse("aa_resnet50:num_heads=[2,4,8,8],window={layer1.*: 7, layer2.*: 13},downsample=0")
    window = {"layer1.*": 7, "layer2.*": 13}
    assert listed.options == {"num_heads": [2, 4, 8, 8], "window": window, "downsample": 0}
    assert model.Network.parse(str(listed)) == listed
    with pytest.raises(ValueError, match=r"a value is a number.*got '\[2'"):
        model.Network.parse("aa_resnet50:num_heads=[2")
    with pytest.raises(ValueError, match="option=value"):
        model.Network.parse("aa_resnet50:key_ratio")


def test_wrong_names_and_options_are_found_before_anything_runs():
    for text, hint in (("aa_resnet5", "aa_resnet50"), ("aa_wrn16_4:key_ration=1", "key_ratio")):
        rows = model.measure([model.Network.parse(text)], ["infer"], 1, 16, False, CPU, 1)
        with pytest.raises(ValueError, match=hint):
            next(rows)


def test_a_training_step_trains():
    network = model.Network("aa_wrn16_4").build(8)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    call, held = model.prepare_training(network, 2, 8, False, CPU)
    call()
    changed = [not torch.equal(old, new) for old, new in zip(before, network.parameters(), strict=True)]
    assert all(changed)
    assert all(parameter.grad is None for parameter in network.parameters())
    parameters = sum(parameter.nbytes for parameter in network.parameters())
    assert sum(tensor.nbytes for tensor in held()) > 2 * parameters  # with momentum


@pytest.mark.slow
def test_model_compares_with_the_first(tmp_path, capsys):
    path = tmp_path / "model.json"
    names = ["plain_wrn16_4", "aa_wrn16_4:window=3"]
    model.run(names, batch=2, size=8, compiled=False, device="cpu", rounds=1, json_to=str(path))
    rows = json.loads(path.read_text())["rows"]
    found = [(row["model"], row["options"], row["phase"]) for row in rows]
    networks = [("plain_wrn16_4", {}), ("aa_wrn16_4", {"window": 3})]
    assert found == [(*network, phase) for network in networks for phase in ("infer", "train")]
    assert [row["launched_to_first"] == 1 for row in rows] == [True, True, False, False]
    assert all(row["peak_bytes"] > 0 for row in rows)
    assert [row["images_per_second"] for row in rows] == pytest.approx(
        [2e3 / row["launched_ms"]["p50"] for row in rows]
    )
    assert "aa_wrn16_4:window=3" in capsys.readouterr().out


@pytest.mark.slow
def test_kernels_launched_from_cpp(tmp_path, monkeypatch, capsys):
    compiled_with, path = [], tmp_path / "model.json"
    monkeypatch.setattr(
        model, "compile_apart", lambda call: compiled_with.append(torch._inductor.config.cpp_wrapper) or call
    )
    options = {"batch": 2, "size": 8, "phases": ["infer"], "device": "cpu", "rounds": 1, "json_to": str(path)}
    for cpp_wrapper in (False, True):
        model.run(["plain_wrn16_4"], cpp_wrapper=cpp_wrapper, **options)
        assert json.loads(path.read_text())["settings"]["cpp_wrapper"] is cpp_wrapper
        assert ("launched from C++" in capsys.readouterr().out) is cpp_wrapper
    assert compiled_with == [False, True]
    with pytest.raises(ValueError, match="drop --no-compile"):
        model.run(["plain_wrn16_4"], compiled=False, cpp_wrapper=True, device="cpu")


def test_table2_writes_what_the_table_reads(tmp_path, monkeypatch):
    timed = {"p20": 1.0, "p50": 2.0, "p80": 3.0}
    (tmp_path / "benchmarks").mkdir()
    results = table2.Latencies("table2", CPU, str(tmp_path / "benchmarks/table2.json"), batch=1)
    rows = [
        {"model": row.model, "options": row.options, "phase": phase, "launched_ms": {}, "launched_to_first": 9.0}
        | {"graph_ms": timed, "graph_to_first": 1.0}
        for row in table2.TABLE_2
        for phase in table2.PHASES
    ]
    del rows[3]["graph_ms"], rows[3]["graph_to_first"]  # se, training: launched must not be set against graphs
    rows[4] |= {"graph_ms": {**timed, "p50": 3.0}, "graph_to_first": 1.4}  # bam, beside its own run's plain
    results.replace(rows)

    from aaconv.paper import cells

    monkeypatch.chdir(tmp_path)
    cells = {(cell.row, cell.column): cell.exact for cell in cells.cells([2])}
    assert cells["BAM", "infer"] == pytest.approx(40)
    assert cells["AA (upsilon = 0.25)", "train"] == 0
    assert cells["SE", "infer"] is None  # one phase is missing


def test_table2_completes_a_file(tmp_path, monkeypatch):
    """What an interrupted run has measured stays; the rest is measured beside the plain network, which stays, too."""
    measured, path = [], tmp_path / "table2.json"

    def measure(networks, phases, *args):
        measured.append([network.name for network in networks])
        time = {"p20": 1.0, "p50": float(len(measured)), "p80": 3.0}
        rows = [
            {"model": n.name, "options": n.options, "phase": p, "launched_ms": time} for n in networks for p in phases
        ]
        yield rows[:4] if len(measured) == 1 else rows  # the first is cut off after two networks

    monkeypatch.setattr(table2, "measure", measure)
    monkeypatch.setattr(table2, "print_rows", lambda *args, **settings: None)
    table2.run(device="cpu", batch=1, json_to=str(path))
    table2.run(device="cpu", batch=1, json_to=str(path), complete=True)
    everything = [row.model for row in table2.TABLE_2]
    assert measured == [everything, everything[:1] + everything[2:]]
    records = json.loads(path.read_text())
    assert [(record["model"], record["infer_ms"]) for record in records] == [
        (name, 1 if index < 2 else 2) for index, name in enumerate(everything)
    ]
    with pytest.raises(ValueError, match=r"measured with .*'batch': 1.*not .*'batch': 2"):
        table2.run(device="cpu", batch=2, json_to=str(path), complete=True)
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="is not what `aaconv bench table2` writes"):
        table2.run(device="cpu", batch=2, json_to=str(path), complete=True)
    path.unlink()
    with pytest.raises(ValueError, match=r"there is no .*table2\.json to complete"):
        table2.run(device="cpu", batch=2, json_to=str(path), complete=True)
    for nowhere in (None, "-"):
        with pytest.raises(ValueError, match="--complete needs --json FILE"):
            table2.run(device="cpu", batch=2, json_to=nowhere, complete=True)
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("attend_backward_keys", "attend_backward_keys"),
        ("sum_rows", "sum_rows"),
        ("triton_poi_fused_add_max_pool2d_with_indices_91", "pointwise"),
        ("triton_red_fused__native_batch_norm_legit_functional_13", "reductions"),
        ("triton_poi_fused_convolution_backward_89", "pointwise"),
        (
            "sm90_xmma_dgrad_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64",
            "convolutions and products",
        ),
        ("nvjet_sm90_tst_128x192_64x5_2x1_v_bz_coopB_NNN", "convolutions and products"),
        ("Memset (Unknown)", "copies"),
        ("something_else", "other"),
    ],
)
def test_kernels_have_a_kind(kernel, kind):
    assert kernels.kind_of(kernel) == kind


def test_only_what_takes_time_on_the_device_has_a_kind():
    def event(name, microseconds, device=DeviceType.CUDA):
        return SimpleNamespace(name=name, device_time=microseconds, device_type=device)

    events = [
        *(event("pack", time) for time in (3.0, 5.0)),
        event("nvjet_sm90_tst_128x192", 40.0),
        event("cudaLaunchKernel", 0.0, DeviceType.CPU),
        event("Activity Buffer Request", 0.5, DeviceType.CPU),
        event("Memset (Device)", 0.0),
    ]
    times = kernels.by_kind(events, repeats=2)
    assert times == {"convolutions and products": pytest.approx(0.02), "pack": pytest.approx(0.004)}
    assert list(times) == ["convolutions and products", "pack"]


def test_a_free_attention_leaves_the_rest_of_the_step(capsys):
    networks = [model.Network(name) for name in ("plain_resnet50", "se_resnet50", "aa_resnet50")]
    kernels_ms = [{"pointwise": 8.0}, {"pointwise": 9.0}, {"pointwise": 8.0, "pack": 1.0, "attend_forward": 2.0}]
    cases = [model.Case(n, "train", kernels_ms=ms) for n, ms in zip(networks, kernels_ms, strict=True)]
    timings = [{"graph": Timing(ms, ms, ms)} for ms in (8.0, 9.0, 13.0)]
    rows = [case.row(timing, timings[0], batch=1) for case, timing in zip(cases, timings, strict=True)]
    assert [row.get("free_attention_to_first") for row in rows] == [None, None, 10 / 8]
    results = Results("model", CPU, None)
    results.replace(rows)
    model.print_rows(results, torch.device("cuda"), batch=1, size=8, compiled=False)
    assert re.search(r"aa_resnet50 .* 1\.625 +1\.250", capsys.readouterr().out)


def test_times_by_kind_are_told_in_a_line():
    line = kernels.describe({"pointwise": 6.6, "pack": 0.5, "attend_forward": 0.42, "other": 0.001})
    assert line == "pointwise 6.60, attention 0.92 (pack 0.50, attend_forward 0.42)"
