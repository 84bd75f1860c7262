"""RetinaNet: the paper's numbers, any backbone and size; its anchors, loss and detections against torchvision's."""

from itertools import chain

import pytest
import timm
import torch
from torch import nn
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.ops import box_iou, sigmoid_focal_loss

from aaconv.cost.counting import count_named
from aaconv.detection import AnchorSettings, DetectionLoss, PostprocessSettings, make_anchors, match, postprocess
from aaconv.layers.aaconv import AAConv2d
from aaconv.models import create_model, list_models, retinanet

NAMES = [f"{kind}_retinanet_resnet{depth}" for kind in ("plain", "se", "aa") for depth in (18, 50, 101)]
SMALL = {"num_classes": 3, "channels": 16, "head_depth": 1}


def on_meta(name, **options):
    with torch.device("meta"):
        return timm.create_model(name, **options)


def small(backbone="test_resnet", **options):
    return retinanet(backbone, **{**SMALL, **options})


def random_boxes(*shape, size=64.0, smallest=2.0):
    low = torch.rand(*shape, 2) * (size - smallest)
    high = low + smallest + torch.rand(*shape, 2) * (size - smallest - low)
    return torch.cat([low, high], dim=-1)


def test_timm_builds_every_name_but_does_not_list_it_among_its_classifiers():
    assert set(list_models("*retinanet*")) == set(NAMES)
    assert all(timm.is_model(name) for name in NAMES)
    assert not set(NAMES) & {*timm.list_models(), *timm.list_models(module="aa_retinanet", include_tags=True)}
    assert list_models("aa_r*18") == ["aa_resnet18", "aa_retinanet_resnet18"]


@pytest.mark.parametrize(
    ("name", "parameters", "gflops"),
    [
        ("plain_retinanet_resnet50", 33_420_404, 182.42),
        ("se_retinanet_resnet50", 35_935_348, 182.51),
        ("aa_retinanet_resnet50", 33_109_766, 182.45),
        ("plain_retinanet_resnet101", 52_412_532, 243.06),
        ("se_retinanet_resnet101", 57_155_700, 243.21),
        ("aa_retinanet_resnet101", 51_710_010, 244.63),
    ],
)
def test_the_papers_parameters_and_gflops(name, parameters, gflops):
    cost = count_named(name)
    assert cost.size == (640, 640)
    assert cost.params == parameters
    assert cost.gflops == pytest.approx(gflops, abs=0.01)


def test_attention_is_where_the_paper_has_it():
    layers = {n: m for n, m in on_meta("aa_retinanet_resnet50").named_modules() if isinstance(m, AAConv2d)}
    settings = {(n.split(".")[1], m.size[0], m.key_channels, m.value_channels) for n, m in layers.items()}
    assert settings == {("layer2", 20, 24, 8), ("layer3", 40, 48, 24), ("layer4", 20, 96, 48)}
    assert not any(".0." in name for name in layers)  # the blocks with a stride stay as they are
    assert len(layers) == 3 + 5 + 2


def test_relative_tables_follow_the_image_size():
    model = on_meta("aa_retinanet_resnet18", img_size=(128, 256))
    sizes = {m.size for m in model.modules() if isinstance(m, AAConv2d)}
    assert sizes == {(4, 8), (8, 16)}


@pytest.mark.parametrize("size", [(64, 64), (64, 96), (40, 72)])
def test_outputs_are_one_row_an_anchor(size):
    model = small(anchor_scales=3).eval()
    logits, codes = model(torch.randn(2, 3, *size))
    positions = sum(-(-size[0] // stride) * -(-size[1] // stride) for stride in model.strides)
    assert logits.shape == (2, 9 * positions, 3)
    assert codes.shape == (2, 9 * positions, 4)
    assert logits.sigmoid().mean().item() == pytest.approx(0.01, abs=0.003)  # nearly all is background


@pytest.mark.parametrize("backbone", ["resnet18", "mobilenetv3_small_050", "convnext_atto", "aa_resnet18"])
def test_any_backbone_with_features(backbone):
    model = small(backbone).eval()
    assert model.strides == (8, 16, 32, 64, 128)
    logits, _ = model(torch.randn(1, 3, 64, 64))
    assert logits.shape == (1, sum(len(level) for level in model.anchors((64, 64))), 3)


def test_a_built_backbone_and_one_that_does_not_fit():
    model = small(timm.create_model("test_resnet", features_only=True))
    assert model(torch.randn(2, 3, 32, 32))[0].shape[-1] == 3
    with pytest.raises(ValueError, match="Conv2d has no feature_info"):
        small(nn.Conv2d(3, 3, 1))
    with pytest.raises(ValueError, match=r"three maps.*got strides=\[2, 4\]"):
        small(timm.create_model("test_resnet", features_only=True, out_indices=(0, 1)))
    with pytest.raises(TypeError, match="takes no options, got drop_rate"):
        small(timm.create_model("test_resnet", features_only=True), drop_rate=0.1)
    with pytest.raises(ValueError, match="num_classes=0"):
        small(num_classes=0)
    with pytest.raises(TypeError, match="key_ration"):
        on_meta("aa_retinanet_resnet18", key_ration=0.5)


def test_every_level_has_its_own_batch_norms_and_all_share_the_convolutions():
    model = small()
    assert len(model.pyramid.norms) == 5
    for head in (model.class_head, model.box_head):
        assert len(head.convs) == 1
        assert [len(norms) for norms in head.norms] == [5]
    used = []
    for level, norm in enumerate(model.class_head.norms[0]):
        norm.register_forward_hook(lambda _, inputs, out, level=level: used.append((level, inputs[0].shape[-1])))
    model(torch.randn(2, 3, 64, 64))
    assert used == [(0, 8), (1, 4), (2, 2), (3, 1), (4, 1)]


def test_lists_of_images_of_any_size_give_boxes_in_their_pixels():
    model = small("aa_resnet18").eval()
    with torch.no_grad():
        model.class_head.predict.bias.fill_(0.0)
    images = [torch.randn(3, 50, 70), torch.randn(3, 33, 20)]
    found = model(images)
    assert len(found) == 2
    for image, one in zip(images, found, strict=True):
        assert 0 < len(one.scores) <= 100
        assert one.scores.diff().max() <= 0
        assert one.boxes.min() >= 0
        assert one.boxes[:, 2].max() <= image.shape[2]
        assert one.boxes[:, 3].max() <= image.shape[1]
    assert model([]) == []


def test_what_a_timm_user_expects():
    model = create_model("plain_retinanet_resnet18", num_classes=5, **{k: SMALL[k] for k in ("channels", "head_depth")})
    assert model.pretrained_cfg["architecture"] == "plain_retinanet_resnet18"
    assert model.get_submodule(model.pretrained_cfg["first_conv"]).in_channels == 3
    assert model.get_submodule(model.pretrained_cfg["classifier"]) is model.get_classifier()
    model.reset_classifier(7)
    assert model(torch.randn(2, 3, 32, 32))[0].shape[-1] == model.num_classes == 7
    grouped = timm.models.group_parameters(model, model.group_matcher())
    assert sorted(chain.from_iterable(grouped.values())) == sorted(name for name, _ in model.named_parameters())
    model.set_grad_checkpointing()
    model(torch.randn(2, 3, 32, 32))[0].sum().backward()
    assert model.backbone.conv1.weight.grad is not None


def test_anchors_stand_in_the_order_of_the_outputs():
    settings = AnchorSettings(scale=4, scales=2, ratios=(1.0, 2.0))
    first, second = make_anchors((32, 64), (8, 16), settings, torch.device("cpu"))
    assert len(first) == 4 * 8 * 4
    assert len(second) == 2 * 4 * 4
    middles = (first[:, :2] + first[:, 2:]) / 2
    assert middles.view(4, 8, 4, 2)[3, 5].tolist() == [[40.0, 24.0]] * 4
    sides = (first[:, 2:] - first[:, :2])[:4]
    assert sides.prod(1).sqrt().tolist() == pytest.approx([32, 45.25, 32, 45.25], abs=1.0)
    assert (sides[2, 1] / sides[2, 0]).item() == pytest.approx(2, abs=0.1)


def test_the_default_anchors_are_six_a_position():
    assert AnchorSettings() == AnchorSettings(scale=4.0, scales=2, ratios=(0.5, 1.0, 2.0))
    assert AnchorSettings().per_position == 6
    assert AnchorSettings(scale=0.5).scale == 0.5


@pytest.mark.parametrize(
    ("options", "told"), [({"anchor_scale": 0}, "anchor_scale"), ({"anchor_scales": 0}, "anchor_scales=0")]
)
def test_impossible_anchors_are_named(options, told):
    with pytest.raises(ValueError, match=told):
        small(**options)
    with pytest.raises(ValueError, match="anchor_ratios"):
        small(anchor_ratios=[])


def test_anchors_are_made_once_and_only_for_whole_canvases():
    model = small()
    assert model.anchors((64, 32)) is model.anchors((64, 32))
    with pytest.raises(ValueError, match="multiple of 32, got 64 x 40"):
        model.anchors((64, 40))


def test_matching_is_torchvisions_for_every_image_of_a_batch():
    anchors = torch.cat(make_anchors((64, 64), (8, 16, 32), AnchorSettings(2.0), torch.device("cpu")))
    boxes = random_boxes(6, 5)
    present = torch.tensor([[True] * n + [False] * (5 - n) for n in (5, 4, 3, 2, 1, 0)])
    boxes[~present] = 0.0
    found = match(anchors, boxes, present)
    reference = Matcher(0.5, 0.4, allow_low_quality_matches=True)
    for image in range(5):
        there = boxes[image][present[image]]
        assert torch.equal(found[image], reference(box_iou(there, anchors)))
    assert (found[5] == -1).all()
    assert {-2, -1, 0} <= set(found.flatten().tolist())


def test_the_loss_is_the_sum_over_single_images():
    anchors = torch.cat(make_anchors((64, 64), (8, 16, 32), AnchorSettings(2.0), torch.device("cpu")))
    boxes, labels = random_boxes(3, 4), torch.randint(5, (3, 4))
    labels[1, 2:] = -1
    labels[2] = -1
    logits, codes = torch.randn(3, len(anchors), 5), torch.randn(3, len(anchors), 4)
    class_loss, box_loss = DetectionLoss(box_weight=1.0)(logits, codes, anchors, boxes, labels)

    classes, regression, number = 0.0, 0.0, 0
    for image in range(2):
        there = labels[image] >= 0
        matches = Matcher(0.5, 0.4, allow_low_quality_matches=True)(box_iou(boxes[image][there], anchors))
        found = matches >= 0
        target = torch.zeros(len(anchors), 5)
        target[found, labels[image][there][matches[found]]] = 1.0
        classes += sigmoid_focal_loss(logits[image], target)[matches != -2].sum()
        wanted = BoxCoder((1.0,) * 4).encode_single(boxes[image][there][matches[found]], anchors[found])
        regression += nn.functional.smooth_l1_loss(codes[image][found], wanted, beta=0.1, reduction="sum")
        number += int(found.sum())
    classes += sigmoid_focal_loss(logits[2], torch.zeros(len(anchors), 5)).sum()
    torch.testing.assert_close(class_loss, classes / number)
    torch.testing.assert_close(box_loss, regression / number)


def test_a_batch_without_objects_has_a_finite_loss_and_gradient():
    anchors = torch.cat(make_anchors((32, 32), (8, 16), AnchorSettings(), torch.device("cpu")))
    logits = torch.zeros(2, len(anchors), 3, requires_grad=True)
    codes = torch.zeros(2, len(anchors), 4, requires_grad=True)
    class_loss, box_loss = DetectionLoss()(logits, codes, anchors, torch.zeros(2, 1, 4), torch.full((2, 1), -1))
    (class_loss + box_loss).backward()
    assert class_loss > 0
    assert box_loss == 0
    assert logits.grad.isfinite().all()
    assert (codes.grad == 0).all()


@pytest.mark.slow
def test_the_network_compiles_as_one_graph():
    model, images = small().eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
        torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.slow
def test_the_loss_compiles_as_one_graph():
    anchors = torch.cat(make_anchors((32, 32), (8, 16), AnchorSettings(), torch.device("cpu")))
    boxes, labels = random_boxes(2, 3, size=32.0), torch.tensor([[0, 1, -1], [2, -1, -1]])
    logits, codes = (torch.randn(2, len(anchors), n, requires_grad=True) for n in (3, 4))
    compiled = torch.compile(DetectionLoss(), backend="aot_eager", fullgraph=True, dynamic=False)
    results = []
    for criterion in (DetectionLoss(), compiled):
        losses = criterion(logits, codes, anchors, boxes, labels)
        results.append([*losses, *torch.autograd.grad(sum(losses), (logits, codes))])
    torch.testing.assert_close(*results)


def test_coded_boxes_come_back_and_overlapping_ones_go():
    levels = make_anchors((64, 64), (8, 16, 32), AnchorSettings(2.0), torch.device("cpu"))
    anchors = torch.cat(levels)
    wanted = torch.tensor([[4.0, 6.0, 30.0, 28.0], [40.0, 33.0, 90.0, 60.0]])
    best = box_iou(anchors, wanted).topk(3, dim=0).indices
    logits, codes = torch.full((1, len(anchors), 2), -9.0), torch.zeros(1, len(anchors), 4)
    for label in (0, 1):
        for rank, anchor in enumerate(best[:, label]):
            logits[0, anchor, label] = 3.0 - rank
            codes[0, anchor] = BoxCoder((1.0,) * 4).encode_single(wanted[label][None], anchors[anchor][None])[0]
    (found,) = postprocess(logits, codes, levels, [(64, 64)])
    assert found.labels.tolist() in ([0, 1], [1, 0])
    wanted[1, 2] = 64.0  # clipped to the image
    torch.testing.assert_close(found.boxes[found.labels.argsort()], wanted, atol=1e-3, rtol=0)
    (few,) = postprocess(logits, codes, levels, [(64, 64)], PostprocessSettings(most=1))
    assert len(few.scores) == 1
    (none,) = postprocess(logits, codes, levels, [(64, 64)], PostprocessSettings(threshold=0.99))
    assert len(none.boxes) == len(none.labels) == 0
