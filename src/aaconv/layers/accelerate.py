"""accelerate: compute the 2-D relative attention of SAM, ViTDet, BoTNet and their kin by our operator."""

from torch import nn

from . import trial
from .accelerate_report import Kept, Replaced, Report
from .accelerated import Accelerated, has_tables
from .families_2d import SWITCHES, Bottleneck, Packed
from .families_decomposed import Halo, MultiScale

FAMILIES: tuple[type[Accelerated], ...] = (Packed, Bottleneck, Halo, MultiScale)


def accelerate(model: nn.Module) -> Report:
    """Compute attention with 2-D relative positions by attend_2d and attend_decomposed, in place; returns a report.

    Found by their structure: the attention of segment-anything, ViTDet (detectron2), timm's SAM, BoTNet, HaloNet and
    MViTv2, and the encoders of transformers that descend from them. Each is tried on a few pixels against its own
    forward before it is replaced, so outputs and gradients stay what they were, up to rounding. Parameters and state
    dicts are untouched; `report.undo()` restores every forward. Print the report for what was replaced, what was not,
    and why.

    A call that the operator cannot do exactly (attention dropout in training, weights asked for, a mask) goes to the
    module's own forward.

    >>> import timm
    >>> encoder = timm.create_model("samvit_base_patch16", img_size=64, embed_dim=24, depth=1, num_heads=2)
    >>> report = accelerate(encoder)
    >>> print(report)
    module         class      heads  depth   tables  computed by  notes
    blocks.0.attn  Attention      2     12  14 x 14  attend_2d
    in all                                              1 of 1
    >>> report.undo()
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = {name: module for name, module in model.named_modules() if _has_relative_positions(module)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention with 2-D relative positions: accelerate looks for modules with "
            f"the tables rel_pos_h and rel_pos_w (SAM, ViTDet, MViTv2), or height_rel and width_rel (BoTNet, HaloNet)"
        )
    replaced, kept = [], []
    for name, module in found.items():
        attention, name = _accelerated(module), name or "the model itself"
        if isinstance(attention, Accelerated):
            replaced.append(Replaced(name, module, attention))
        else:
            kept.append(Kept(name, module, attention))
    for row in replaced:
        row.module.forward = row.accelerated
    return Report(tuple(replaced), tuple(kept))


def _has_relative_positions(module: nn.Module) -> bool:
    """Whether this is a module to report on: it has tables, or the switch that would give it some."""
    switched = hasattr(module, "qkv") and any(hasattr(module, name) for name in SWITCHES)
    tables = has_tables(module, "rel_pos_h", "rel_pos_w")
    return switched or tables or has_tables(getattr(module, "pos_embed", None), "height_rel", "width_rel")


def _accelerated(module: nn.Module) -> Accelerated | str:
    """What is to stand in for the module's forward, or the reason why nothing can."""
    there = vars(module).get("forward")
    if isinstance(there, Accelerated):
        return there
    if there is not None:
        return f"its forward has been replaced already, by {type(there).__name__}"
    family = next((family for family in FAMILIES if family.fits(module)), None)
    if family is None:
        return "unknown form: it has relative tables, but not the parts of a family that accelerate knows"
    if reason := family.why_not(module):
        return reason
    if len(devices := sorted({str(parameter.device) for parameter in module.parameters()})) > 1:
        return f"its parameters are on {' and '.join(devices)}: move it to one device first"
    attention = family(module)
    return trial.why_not(attention) or attention
