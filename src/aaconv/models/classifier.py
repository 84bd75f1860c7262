"""timm's interface, for networks that are not timm's: features, pooled, then classified."""

from typing import Any

import torch.nn.functional as F
from timm.layers import create_classifier
from torch import Tensor, nn


class Classifier(nn.Module):
    """A network that derives from it defines forward_features, [N, in_chans, H, W] -> [N, num_features, h, w]."""

    def __init__(self, *, num_classes: int, in_chans: int, drop_rate: float) -> None:
        super().__init__()
        self.num_classes, self.in_chans, self.drop_rate = num_classes, in_chans, drop_rate
        self.grad_checkpointing = False

    def add_head(self, num_features: int, global_pool: str, **factory: Any) -> None:
        """The last layers, `global_pool` and `fc`; then every convolution is drawn."""
        self.num_features = self.head_hidden_size = num_features
        self.global_pool, self.fc = create_classifier(num_features, self.num_classes, pool_type=global_pool, **factory)
        self.init_weights()

    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        weight = next(self.parameters())
        like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.num_classes = num_classes
        self.global_pool, self.fc = create_classifier(self.num_features, num_classes, pool_type=global_pool, **like)
        self.global_pool.train(self.training)
        self.fc.train(self.training)

    def forward_features(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.global_pool(x)
        x = F.dropout(x, self.drop_rate, self.training) if self.drop_rate else x
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))
