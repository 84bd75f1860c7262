"""Recipes: what a training run is made of, one an experiment of the paper."""

from .recipe import Evidence, Model, Recipe

__all__ = ["Evidence", "Model", "Recipe"]
