"""From a name to a run: a folder of its own for each, and none for one that cannot begin."""

import threading

from aaconv import cli, recipes
from aaconv.training import launch


def test_trainings_that_start_at_once_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, found = recipes.get("demo-aa"), []
    threads = [threading.Thread(target=lambda: found.append(launch.free_folder(recipe))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8
    assert all(folder.is_dir() for folder in found)


def test_a_training_that_cannot_begin_leaves_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["train", "demo-aa", "--data", "folder/nowhere", "--device", "cpu"]
    assert cli.main(command) == 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    assert cli.main(command) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_of_a_person_stays_although_a_run_cannot_begin(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert cli.main(["train", "demo-aa", "--data", "folder/nowhere", "--device", "cpu", "--run", "mine"]) == 2
    assert (tmp_path / "mine").is_dir()


def test_a_file_in_the_place_of_runs_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    assert cli.main(["train", "demo-aa", "--device", "cpu"]) == 2
    assert "runs/demo-aa-seed0 cannot be written: File exists" in capsys.readouterr().err
