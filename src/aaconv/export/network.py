"""Networks as files that other programs run: ONNX, or torch.export's own .pt2: `aaconv export`.

The file is run before it takes its name, by onnxruntime or torch, on random images of two sizes and two batch sizes,
and its outputs are compared with the network's. One that is too far off is not kept. It also holds what it takes to use
it, names of classes among it (`about`): as metadata of ONNX, or as an extra file of .pt2.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torchvision.ops import clip_boxes_to_image, nms

from ..attention import default_backend
from ..detection.postprocess import PostprocessSettings, best_of_level
from ..layers.aaconv import AAConvNd
from ..runs.load import TrainedModel, load_model
from ..utils.files import check_writable, replacing
from .about import EXTRA_FILE, about, as_texts

TOLERANCE = 1e-4
"""The largest difference between an output of the file and of the network, as a part of the largest output."""
OPSET = 18
INPUT = "images"
AXES = ("batch", "channels", "height", "width")
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
Run = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Check:
    """Outputs of the file beside those of the network, for one batch: the largest difference, as a part."""

    shape: tuple[int, ...]
    error: float
    objects: int | None = None

    def __str__(self) -> str:
        found = "" if self.objects is None else f", {self.objects} objects"
        return f"{' x '.join(map(str, self.shape))}: largest difference {self.error:.1e}{found}"


def export(
    source: str | Path | nn.Module | TrainedModel,
    path: str | Path,
    *,
    size: int | None = None,
    opset: int | None = None,
    raw: bool = False,
    fixed: bool = False,
    weights: str | None = None,
    pretrained: bool = False,
    augment: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = print,
) -> list[Check]:
    """Write a run's network, a registered one, or one in hand, to a .onnx or .pt2 file that takes normalised images.

    augment: of a registered one, the keywords of aaconv.augment, which changes it before.
    The batch is free, and height and width are where the network allows it (`fixed`: they are not). A detector gives
    boxes, scores and labels of one image of `size`, or, `raw`, logits and box codes of every anchor of a batch.
    """
    path = Path(path)
    if path.suffix not in (".onnx", ".pt2"):
        raise ValueError(f"the file must end in .onnx or .pt2, got {str(path)!r}")
    if path.suffix == ".onnx":
        _need_packages()
    elif opset is not None:
        raise ValueError("opset belongs to .onnx files; leave it out for .pt2")
    check_writable(path)
    loaded = load_model(source, weights=weights, pretrained=pretrained, augment=augment)
    size = size or loaded.size
    subject = _subject(loaded, size, raw)
    with replacing(path) as draft, _torch_alone(subject.module):
        free, checks = _write(subject, draft, size, opset or OPSET, fixed, say)
        if not subject.batched and not any(check.objects for check in checks):
            _check_scores(loaded.model, path.suffix, size, opset or OPSET, say)
        megabytes = draft.stat().st_size / 1e6
    why = "" if subject.batched else ": images differ in their number of objects, raw takes batches"
    say(
        f"wrote {path}: {megabytes:.1f} MB, {INPUT} [{'batch' if free.batch else 1}, 3, {size}, {size}] -> "
        f"{', '.join(subject.outputs)}; free: {free}{why}"
    )
    return checks


class _DoesNotRun(ValueError):
    """The file was written, but something stops it."""


def _write(
    subject: Subject, path: Path, size: int, opset: int, fixed: bool, say: Callable[[str], None]
) -> tuple[Free, list[Check]]:
    """Write the file and run it; what is free in it, and how far it is off."""
    say(f"tracing the network at {size} x {size}")
    program, free = _trace(subject, size, fixed, say)
    if path.suffix == ".onnx":
        say("translating to ONNX, which takes minutes for a large network")
        run = _write_onnx(program, subject, path, opset)
    else:
        run = _write_program(program, subject, path)
    say("running the file beside the network")
    try:
        return free, _compare(run, subject, size, free, say)
    except _DoesNotRun as error:
        # Torch may trace a free size and bind it all the same: 2.11 keeps odd ones odd where there is pooling.
        if not free.sides:
            raise
        say(f"not with {free} free: {error}")
        return _write(subject, path, size, opset, True, say)


def _check_scores(model: nn.Module, suffix: str, size: int, opset: int, say: Callable[[str], None]) -> None:
    """Compare a detector that finds nothing in noise after all: by its scores, in such a file with a threshold of 0.

    Boxes of almost equal scores may change places, their sorted scores stay.
    """
    say("no objects in random images: once more with a threshold of 0, in a file that is not kept")
    module = Detector(model, size, PostprocessSettings(threshold=0.0)).eval()
    with TemporaryDirectory() as place:
        _write(
            Subject(_Scores(module), ("scores",), batched=False), Path(place) / f"check{suffix}", size, opset, True, say
        )


@dataclass(frozen=True)
class Subject:
    """What is exported: a module of one batch of images, what its outputs are called, and what the file says of it."""

    module: nn.Module
    outputs: tuple[str, ...]
    batched: bool = True
    facts: dict[str, Any] = field(default_factory=dict)

    def __call__(self, images: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            found = self.module(images)
        return [found] if isinstance(found, Tensor) else list(found)


@dataclass(frozen=True)
class Free:
    """Which sizes of the input the file leaves open."""

    batch: bool = False
    sides: bool = False

    def __str__(self) -> str:
        return ", ".join(["batch"] * self.batch + ["height", "width"] * self.sides) or "nothing"


class Detector(nn.Module):
    """A RetinaNet and its post-processing for one image of a size: [1, 3, size, size] -> boxes, scores, labels.

    `model.detect` in operations whose shapes do not depend on the image until the very end. A box below the threshold,
    or without area, never removes a better one, so it may as well be left out last.
    """

    def __init__(self, model: nn.Module, size: int, settings: PostprocessSettings | None = None) -> None:
        super().__init__()
        self.model, self.size, self.settings = model, size, settings or PostprocessSettings()
        self.levels = len(anchors := model.anchors((size, size)))  # type: ignore[operator]
        for level, boxes in enumerate(anchors):
            self.register_buffer(f"anchors_{level}", boxes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        anchors = [getattr(self, f"anchors_{level}") for level in range(self.levels)]
        lengths = [len(boxes) for boxes in anchors]
        by_level = zip(*(part.split(lengths, 1) for part in self.model(images)), anchors, strict=True)
        number = self.settings.candidates
        best = [best_of_level(logits, codes, boxes, number) for logits, codes, boxes in by_level]
        boxes, scores, labels = (torch.cat(parts, dim=1)[0] for parts in zip(*best, strict=True))
        boxes = clip_boxes_to_image(boxes, (self.size, self.size))
        sides = boxes[:, 2:] - boxes[:, :2]
        scores = torch.where(sides.amin(1) < 1e-2, -1.0, scores)
        # One suppression for all classes: boxes of different ones are moved apart.
        apart = boxes + (labels * (self.size + 1.0))[:, None].to(boxes.dtype)
        kept = nms(apart, scores, self.settings.overlap)
        rank = torch.arange(kept.shape[0], device=kept.device)
        kept = kept[(scores[kept] > self.settings.threshold) & (rank < self.settings.most)]
        return boxes[kept], scores[kept], labels[kept]


class _Scores(nn.Module):
    """Of a detector only the scores."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> Tensor:
        return self.detector(images)[1]


def _subject(loaded: TrainedModel, size: int, raw: bool) -> Subject:
    detects = hasattr(loaded.model, "detect")
    if raw and not detects:
        raise ValueError(f"{loaded.source} does not detect, its outputs are raw already; leave out raw")
    if not detects:
        return Subject(loaded.model, ("logits",), facts=about(loaded, size, ("logits",)))
    outputs = ("logits", "box_codes") if raw else ("boxes", "scores", "labels")
    module = loaded.model if raw else Detector(loaded.model, size).eval()
    return Subject(module, outputs, batched=raw, facts=about(loaded, size, outputs))


def _need_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"ONNX files need {', '.join(missing)}: pip install 'aaconv[export]'")


@contextmanager
def _torch_alone(module: nn.Module) -> Iterator[None]:
    """Attention by torch's own operators, and without the exporters' many remarks."""
    layers = [layer for layer in module.modules() if isinstance(layer, AAConvNd)]
    before = [layer.backend for layer in layers]
    for layer in layers:
        layer.backend = None
    silenced = logging.root.manager.disable
    logging.disable(max(silenced, logging.WARNING))
    try:
        with warnings.catch_warnings(), default_backend("sdpa"):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(silenced)
        for layer, backend in zip(layers, before, strict=True):
            layer.backend = backend


def _trace(subject: Subject, size: int, fixed: bool, say: Callable[[str], None]) -> tuple[ExportedProgram, Free]:
    """The network as a graph, and what is free in it: all that is asked for, or as much as torch can."""
    attempts = [Free(batch=True, sides=True), Free(batch=True), Free()]
    if fixed or not subject.batched:
        attempts = attempts[1:] if subject.batched else attempts[2:]
    for free in attempts:
        try:
            return _exported(subject, size, free), free
        except ValueError as error:
            if free is attempts[-1]:
                raise
            say(f"not with {free} free: {error}")
    raise AssertionError("unreachable: the last attempt returns or raises")


def _exported(subject: Subject, size: int, free: Free) -> ExportedProgram:
    axes = {axis: Dim.DYNAMIC for axis, is_free in ((0, free.batch), (2, free.sides), (3, free.sides)) if is_free}
    try:
        images = torch.randn(2 if free.batch else 1, 3, size, size)
        with torch.no_grad():
            subject.module(images)  # a size that cannot run: the network's own message is the shorter one
            program = torch.export.export(subject.module, (images,), dynamic_shapes=(axes,))
    except (RuntimeError, AssertionError) as error:  # torch's many export errors derive from RuntimeError
        lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = lines[1] if lines[0].startswith("Constraints violated") and len(lines) > 1 else lines[0]
        raise ValueError(f"torch.export: {reason}") from None
    _refuse_largest(program, axes)
    return _without_traces(program)


def _refuse_largest(program: ExportedProgram, axes: Iterable[int]) -> None:
    """A ValueError where a free size has an end: torch follows one side of a condition, such as that windows cover the
    map, and beyond the end an ONNX file would go that way all the same. Conditions on several sizes together, or that
    only small maps fail, are not seen; layers of ours have none."""
    (images,) = (node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    for axis in axes:
        most = program.range_constraints[images.meta["val"].shape[axis].node.expr].upper
        if most.is_Integer:  # not infinity
            raise ValueError(f"torch.export: what is computed changes beyond a {AXES[axis]} of {most}")


def _without_traces(program: ExportedProgram) -> ExportedProgram:
    """Without the lines of source that each operation came from: they name folders of this machine."""
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            node.meta.pop("stack_trace", None)
    return program


def _write_program(program: ExportedProgram, subject: Subject, path: Path) -> Run:
    buffer = io.BytesIO()  # on a full disk torch's own writer ends the process
    torch.export.save(program, buffer, extra_files={EXTRA_FILE: json.dumps(subject.facts, indent=2)})
    path.write_bytes(buffer.getbuffer())
    module = torch.export.load(path).module()

    def run(images: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            found = module(images)
        return [found] if isinstance(found, Tensor) else list(found)

    return run


def _write_onnx(program: ExportedProgram, subject: Subject, path: Path, opset: int) -> Run:
    import onnx
    import onnxruntime

    try:
        written = torch.onnx.export(
            program, dynamo=True, opset_version=opset, input_names=[INPUT],
            output_names=list(subject.outputs), verbose=False,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"torch.onnx: {str(error).strip().splitlines()[0]}") from None
    assert written is not None
    model = written.model_proto
    version = next(used.version for used in model.opset_import if not used.domain)
    if version != opset:
        raise ValueError(f"torch writes this network with operators of version {version}, not {opset}; leave out opset")
    _name_sizes(model.graph)
    for name, text in as_texts(subject.facts).items():
        model.metadata_props.add(key=name, value=text)
    onnx.save(model, str(path))
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has its own exceptions
        raise ValueError(f"onnxruntime does not open the file, and it is not kept: {error}") from None
    return lambda images: [torch.from_numpy(part) for part in session.run(None, {INPUT: images.numpy()})]


def _name_sizes(graph: Any) -> None:
    """Sizes that are free are called batch, height and width instead of torch's s77."""
    dims = [dim.dim_param for dim in graph.input[0].type.tensor_type.shape.dim]
    names = {old: new for old, new in zip(dims, AXES, strict=True) if old}
    if not names:
        return
    old = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = old.sub(lambda match: names[match[0]], dim.dim_param)


def _compare(run: Run, subject: Subject, size: int, free: Free, say: Callable[[str], None]) -> list[Check]:
    """Run the file beside the network on random images; a ValueError where they differ too much."""
    shapes = [(1, size, size)]
    if free.batch:
        shapes.append((3, size, size))
    if free.sides:
        shapes += [(1, size * 3 // 2, size * 5 // 4), (2, size * 3 // 2, size * 5 // 4)]
    generator = torch.Generator().manual_seed(0)
    checks = []
    for batch, height, width in shapes:
        images = torch.randn(batch, 3, height, width, generator=generator)
        try:
            ours = run(images)
        except Exception as error:  # onnxruntime has its own exceptions
            raise _DoesNotRun(
                f"the file does not run on {batch} x 3 x {height} x {width} images and is not kept: {error}"
            ) from None
        check = _check(tuple(images.shape), ours, subject(images), subject)
        say(f"  {check}")
        checks.append(check)
        if not check.error <= TOLERANCE:
            raise ValueError(
                f"the file is not kept: its outputs differ from the network's by {check.error:.1e} of the largest, "
                f"more than {TOLERANCE:g}"
            )
    return checks


def _check(shape: tuple[int, ...], found: Sequence[Tensor], exact: Sequence[Tensor], subject: Subject) -> Check:
    error = 0.0
    for ours, theirs in zip(found, exact, strict=True):
        if ours.shape != theirs.shape:
            return Check(shape, math.inf)
        if theirs.numel():
            part = float((ours.double() - theirs.double()).abs().max() / theirs.abs().max().clamp(min=1e-6))
            error = max(error, math.inf if math.isnan(part) else part)
    return Check(shape, error, None if subject.batched else len(exact[0]))
