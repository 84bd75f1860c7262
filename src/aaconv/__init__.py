"""Attention augmented convolutions for PyTorch: convolutional networks that also attend.

Names are imported when they are first used: the attention operator and the layers need torch alone. The models are
registered with timm as soon as timm is imported, before or after this package.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .utils.after_import import after_import
from .version import __version__

if TYPE_CHECKING:
    from . import attention, cost, explore, export, layers, models, recipes, training
    from .attention import attend_2d, attend_decomposed, default_backend, set_default_backend
    from .export.augmented import push_model, save_model
    from .layers import AAConv1d, AAConv2d, accelerate, attention_channels, augment
    from .models import create_model, list_models
    from .runs.load import TrainedModel, load_model

__all__ = [
    "AAConv1d",
    "AAConv2d",
    "TrainedModel",
    "__version__",
    "accelerate",
    "attend_2d",
    "attend_decomposed",
    "attention",
    "attention_channels",
    "augment",
    "cost",
    "create_model",
    "default_backend",
    "explore",
    "export",
    "layers",
    "list_models",
    "load_model",
    "models",
    "push_model",
    "recipes",
    "save_model",
    "set_default_backend",
    "training",
]

_NAMES = {
    **dict.fromkeys(("attend_2d", "attend_decomposed", "default_backend", "set_default_backend"), ".attention"),
    **dict.fromkeys(("AAConv1d", "AAConv2d", "accelerate", "attention_channels", "augment"), ".layers"),
    **dict.fromkeys(("create_model", "list_models"), ".models"),
    **dict.fromkeys(("TrainedModel", "load_model"), ".runs.load"),
    **dict.fromkeys(("push_model", "save_model"), ".export.augmented"),
}
_ROOMS = ("attention", "cost", "explore", "export", "layers", "models", "recipes", "training")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_NAMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register_models() -> None:
    try:
        import_module(".models", __name__)
    except Exception as error:  # whoever imports timm must get it; who asks for a model of ours gets this error
        warnings.warn(f"the models of aaconv are not registered with timm: {error}", stacklevel=2)


after_import("timm", _register_models)
