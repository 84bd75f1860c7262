"""Records of runs that never were, as `aaconv record` keeps them."""

import json
from dataclasses import replace

from aaconv import recipes
from aaconv.recipes.diff import overrides_of


def keep(folder, name, seed, top1, dataset="cifar100", called=None, **changes):
    """A record as `aaconv record` keeps it."""
    usual = recipes.get(name)
    recipe = replace(recipes.override(usual, changes), name=called or name)
    record = {"name": recipe.name, "model": recipe.model.name, "options": recipe.model.options, "seed": seed}
    record |= {"epochs": recipe.epochs, "top1": top1, "top5": top1 + 20, "device": "a GPU", "seconds_per_epoch": 1.5}
    record["overrides"] = overrides_of(replace(recipe, seed=seed, data_dir="/data"))
    place = folder / dataset
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{len(list(place.iterdir()))}.json"
    path.write_text(json.dumps(record))
    return path


def leave_out(path, *fields):
    record = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in record.items() if name not in fields}))
