"""Recipes: what a training run is made of, one per experiment of the paper.

recipes.get("cifar100-small-aa")        # by name; recipes.names() lists them
recipes.save(recipe, "recipe.yaml")     # and recipes.load takes it back
recipes.override(recipe, {"epochs": 30, "model_options": {"num_heads": 4}})
"""

from .ablations import ABLATIONS
from .catalogue import PARTIAL, get, names, paper_row, paper_value, register
from .detection import DETECTION
from .finetuned import FINETUNED
from .overrides import override
from .recipe import Evidence, Model, Recipe
from .yaml_file import load, save

register(*ABLATIONS)
register(*DETECTION)
register(*FINETUNED)

__all__ = [
    "PARTIAL",
    "Evidence",
    "Model",
    "Recipe",
    "get",
    "load",
    "names",
    "override",
    "paper_row",
    "paper_value",
    "register",
    "save",
]
