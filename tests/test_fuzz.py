"""Whatever is in a file: it is read, or refused in one line, in seconds."""

import csv
import hashlib
import io
import json
import random
import shutil
import time
import zlib

import pytest
import torch
import yaml

from aaconv.data.coco import read_annotations
from aaconv.data.tar_shards import TarShards
from aaconv.detection.coco_results import read_results
from aaconv.runs import curves, results, run_folder
from aaconv.runs.load import load_model, measured
from aaconv.runs.record import record_result
from aaconv.training import checkpoint
from aaconv.training.launch import conclusion
from aaconv.training.trainer import resume, train
from aaconv.utils.weights import encode, read_weights
from support.detection_data import make_coco
from support.mutations import mutate_bytes, mutate_json, mutate_value
from support.training_runs import TEN_STEPS, cut

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_curves", "one_thread")]

KINDS = {
    "config": 30,
    "summary": 30,
    "recipe": 35,
    "metrics": 30,
    "annotations": 40,
    "detections": 25,
    "record": 25,
    "state": 25,
    "weights": 25,
    "shard": 15,
    "manifest": 20,
}
"""What is fuzzed, and how often: 300 inputs."""
SECONDS = 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run, one in its middle, and COCO annotations."""
    root = tmp_path_factory.mktemp("good")
    train(TEN_STEPS, root / "whole", device="cpu")
    cut(root / "whole", root / "half", newest=8)
    make_coco(root / "coco")
    return root


def read_run(run):
    loaded = load_model(run)
    measured(loaded, "best")
    run_folder.read_epochs(run)
    if run_folder.is_finished(run):
        conclusion(run_folder.read_summary(run), run)


def fuzz_file(name):
    """Mutate one JSON file of a finished run, and read all of the run."""

    def fuzz(runs, place, dice):
        run = shutil.copytree(runs / "whole", place / "run")
        (run / name).write_bytes(mutate_json(json.loads((run / name).read_text()), dice))
        read_run(run)

    return fuzz


def fuzz_recipe(runs, place, dice):
    run = shutil.copytree(runs / "whole", place / "run")
    file = run / "recipe.yaml"
    if dice.random() < 0.5:
        file.write_bytes(mutate_bytes(file.read_bytes(), dice))
    else:
        content = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump(mutate_value(content, dice), allow_unicode=True), errors="surrogatepass")
    read_run(run)


def fuzz_metrics(runs, place, dice):
    run = shutil.copytree(runs / "whole", place / "run")
    file = run / "metrics.csv"
    if dice.random() < 0.5:
        file.write_bytes(mutate_bytes(file.read_bytes(), dice))
    else:
        rows = mutate_value(list(csv.reader(io.StringIO(file.read_text()))), dice)
        rows = [row if isinstance(row, list) else [row] for row in rows] if isinstance(rows, list) else [[rows]]
        with file.open("w", newline="", errors="surrogatepass") as output:
            csv.writer(output).writerows(rows)
    read_run(run)
    figure_of = curves._read([run])
    curves.figure(figure_of)
    record_result(run, place / "kept")


def fuzz_annotations(runs, place, dice):
    file = runs / "coco" / "annotations" / "instances_train.json"
    (place / "a.json").write_bytes(mutate_json(json.loads(file.read_text()), dice))
    dataset = read_annotations(place / "a.json", runs / "coco" / "train")
    assert len(dataset.objects) == len(dataset.image_ids) == len(dataset.sizes)


def fuzz_detections(runs, place, dice):
    dataset = read_annotations(runs / "coco" / "annotations" / "instances_train.json", runs / "coco" / "train")
    found = [{"image_id": 1, "category_id": 3, "bbox": [1.0, 2, 3, 4], "score": 0.5} for _ in range(3)]
    (place / "d.json").write_bytes(mutate_json(found, dice))
    for result in read_results(place / "d.json", dataset):
        torch.tensor([*result["bbox"], result["score"]])


def fuzz_record(runs, place, dice):
    path = record_result(runs / "whole", place / "results")
    path.write_bytes(mutate_json(json.loads(path.read_text()), dice))
    for experiment in results.experiments(results.read(place / "results")):
        experiment.note  # noqa: B018
        experiment.mean("top1")
    curves._read([path])


def rewrite(folder, name, data):
    """A file of a checkpoint, with its sum."""
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sha256"][name] = hashlib.sha256(data).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def fuzz_state(runs, place, dice):
    run = shutil.copytree(runs / "half", place / "run")
    folder = checkpoint.paths(run / "checkpoints")[-1]
    rewrite(folder, "state.json", mutate_json(json.loads((folder / "state.json").read_text()), dice))
    resume(run, device="cpu")


def fuzz_manifest(runs, place, dice):
    run = shutil.copytree(runs / "half", place / "run")
    folder = checkpoint.paths(run / "checkpoints")[-1]
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_bytes(mutate_json(content, dice))
    found = checkpoint.load_newest(run / "checkpoints", lambda line: None)
    assert found.state["epoch"] >= 0


def fuzz_weights(runs, place, dice):
    tensors = {"a.weight": torch.ones(3, 4), "b": torch.zeros((), dtype=torch.int64)}
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    name, data = dice.choice([("w.pt", buffer.getvalue()), ("w.safetensors", encode(tensors))])
    (place / name).write_bytes(mutate_bytes(data, dice))
    read_weights(place / name)


def fuzz_shard(runs, place, dice):
    shutil.make_archive(str(place / "train-0"), "tar", runs / "coco" / "train")
    data = (place / "train-0.tar").read_bytes()
    start = dice.randrange(0, len(data), 512)
    block = mutate_bytes(data[start : start + 512], dice)
    (place / "train-0.tar").write_bytes(data[:start] + block + data[start + 512 :])
    TarShards([place / "train-0.tar"])


FUZZERS = {
    "config": fuzz_file("config.json"),
    "summary": fuzz_file("summary.json"),
    "recipe": fuzz_recipe,
    "metrics": fuzz_metrics,
    "annotations": fuzz_annotations,
    "detections": fuzz_detections,
    "record": fuzz_record,
    "state": fuzz_state,
    "manifest": fuzz_manifest,
    "weights": fuzz_weights,
    "shard": fuzz_shard,
}


def test_there_are_300_inputs():
    assert sum(KINDS.values()) == 300
    assert set(KINDS) == set(FUZZERS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_mutated_input_is_read_or_refused_in_one_line(kind, runs, tmp_path):
    wrong = []
    for number in range(KINDS[kind]):
        place = tmp_path / str(number)
        place.mkdir()
        start = time.monotonic()
        try:
            FUZZERS[kind](runs, place, random.Random(zlib.crc32(f"{kind} {number}".encode())))
        except (ValueError, OSError) as error:
            if len(str(error)) > 2000:
                wrong.append(f"{number}: a message of {len(str(error))} letters: {str(error)[:80]}")
        except Exception as error:
            wrong.append(f"{number}: {type(error).__name__}: {str(error)[:200]}")
        if time.monotonic() - start > SECONDS:
            wrong.append(f"{number}: took {time.monotonic() - start:.0f} s")
        shutil.rmtree(place)
    assert not wrong, "\n".join(wrong)
