"""`MoHTransNeXt`: the paper's MoH-ViT, with the authors' weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
from keras import ops

from keras_moh.errors import invalid_argument, number_in
from keras_moh.models import checkpoints
from keras_moh.models.cosine_attention import AggregatedAttention, CosineAttention
from keras_moh.models.parts import (
    by_layer,
    drop_path,
    drop_path_rates,
    loss_weight,
    truncated_normal,
)

STAGES = 4
# The image's side by that of the grid of tokens, stage by stage.
REDUCTIONS = (4, 8, 16, 32)
# (3, 6, 12, 24) heads of 24 features, or (4, 8, 16, 32).
SMALL = {"depths": [5, 5, 22, 5], "hidden_sizes": [72, 144, 288, 576], "num_heads": [3, 6, 12, 24]}
BASE = {"depths": [5, 5, 23, 5], "hidden_sizes": [96, 192, 384, 768], "num_heads": [4, 8, 16, 32]}
NAMES = {
    "small-75": SMALL | {"num_shared_heads": [3, 6, 3, 4], "top_k": [0, 0, 6, 12]},
    "small-80": SMALL | {"num_shared_heads": [3, 6, 3, 8], "top_k": [0, 0, 6, 12]},
    "base-75": BASE | {"num_shared_heads": [4, 8, 4, 5], "top_k": [0, 0, 8, 16]},
    "base-50": BASE | {"num_shared_heads": [2, 2, 2, 4], "top_k": [2, 4, 6, 8]},
}


@keras.saving.register_keras_serializable(package="keras_moh")
class MoHTransNeXt(keras.Model):
    """The vision model of the MoH paper, MoH-ViT: TransNeXt with Mixture-of-Head attention.

    Four stages on grids of a quarter, an eighth, a sixteenth and a 32nd of the image's side; in the
    first three a token attends to its neighbours and to the grid pooled, in the last one to all
    tokens (arXiv 2311.17132, 2410.11842). The grids are those of `image_size`, and no other.

    The position bias of these layers allows no implementation that skips heads: every head is
    computed and then gated, as in the authors' code.

    Args:
        image_size: Height and width of the images, a multiple of 32, from 64 on. Defaults to 224.
        num_classes: Number of classes. Defaults to 1000.
        hidden_sizes: Features of a token in each stage.
        depths: Number of layers of each stage.
        num_heads: Number of attention heads in each stage.
        num_shared_heads: Of these, the heads that every token takes, for each stage.
        top_k: Routed heads that a token takes beside them, for each stage; 0 where all are shared.
        mlp_ratios: Width of the MLPs' hidden layer in each stage, by two thirds of the stage's
            features. Defaults to `(8, 8, 4, 4)`.
        window_size: Height and width of the window of neighbours, an odd number. Defaults to 3.
        pool_ratios: Side of the grid by that of the grid pooled, in the first three stages.
            Defaults to `(8, 4, 2)`.
        pretrain_size: Size of the images of the pretraining, where the weights are from one: the
            unit of distances. With it, images may be of 32 x 32. Defaults to `image_size`.
        num_channels: Channels of the images. Defaults to 3.
        drop_path_rate: Rate in `[0, 1)` of stochastic depth in the last layer; in those before it
            rises linearly from 0. The authors train with 0.45 (small) and 0.6 (base). Defaults
            to 0.
        balance_loss_weight: Weight of the load-balancing loss, averaged over the routed layers.
            Defaults to 0.01.
        dtype: Dtype or policy of the layers. Defaults to Keras's global policy.
        name: Name of the model.

    Call arguments:
        inputs: Images `(B, image_size, image_size, num_channels)`, float.
        training: Whether to drop paths and to add the losses.

    Returns:
        Logits `(B, num_classes)`.

    Raises:
        ValueError: for an argument out of its range, numbers of heads that do not fit, or a size of
            images whose last grid is a single token: it has no distances, and the authors' code
            gives NaN.

    Example:
    >>> import numpy as np, keras_moh
    >>> model = keras_moh.models.MoHTransNeXt(
    ...     image_size=64, num_classes=7, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
    ...     num_heads=[2, 4, 4, 8], num_shared_heads=[2, 4, 2, 2], top_k=[0, 0, 1, 4],
    ... )
    >>> tuple(model(np.zeros((2, 64, 64, 3), "float32")).shape)
    (2, 7)
    """

    def __init__(
        self,
        image_size: int = 224,
        num_classes: int = 1000,
        *,
        hidden_sizes: Sequence[int],
        depths: Sequence[int],
        num_heads: Sequence[int],
        num_shared_heads: Sequence[int],
        top_k: Sequence[int],
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        window_size: int = 3,
        pool_ratios: Sequence[int] = (8, 4, 2),
        pretrain_size: int | None = None,
        num_channels: int = 3,
        drop_path_rate: float = 0.0,
        balance_loss_weight: float = 0.01,
        dtype: Any = None,
        name: str | None = None,
    ) -> None:
        hidden_sizes = by_layer("hidden_sizes", hidden_sizes, STAGES, 1)
        depths = by_layer("depths", depths, STAGES, 1)
        num_heads = by_layer("num_heads", num_heads, STAGES, 1)
        num_shared_heads = by_layer("num_shared_heads", num_shared_heads, STAGES, 0)
        top_k = by_layer("top_k", top_k, STAGES, 0)
        pool_ratios = by_layer("pool_ratios", pool_ratios, STAGES - 1, 1)
        if len(mlp_ratios) != STAGES:
            raise invalid_argument("mlp_ratios", f"a list of {STAGES} numbers", mlp_ratios)
        _check_sizes(image_size, image_size if pretrain_size is None else pretrain_size)
        policy = keras.dtype_policies.get(dtype)
        rate = number_in("drop_path_rate", drop_path_rate, 0, below=1)
        rates = iter(drop_path_rates(rate, sum(depths)))
        routed = [k for k, depth in zip(top_k, depths, strict=True) for _ in range(depth)]
        weight = loss_weight(balance_loss_weight, routed)

        def dense(units: int, name: str) -> keras.layers.Dense:
            initializer = truncated_normal()
            return keras.layers.Dense(
                units, kernel_initializer=initializer, name=name, dtype=policy
            )

        def norm(name: str, epsilon: float = 1e-6) -> keras.layers.LayerNormalization:
            return keras.layers.LayerNormalization(epsilon=epsilon, name=name, dtype=policy)

        def embedding(x: Any, stage: int) -> Any:
            """Overlapping patches."""
            name = f"patch_embedding_{stage + 1}"
            kernel, stride = (7, 4) if stage == 0 else (3, 2)
            x = keras.layers.ZeroPadding2D(kernel // 2, name=f"{name}_padding", dtype=policy)(x)
            x = keras.layers.Conv2D(
                hidden_sizes[stage],
                kernel,
                stride,
                data_format="channels_last",
                kernel_initializer=keras.initializers.VarianceScaling(
                    2.0, mode="fan_out", distribution="untruncated_normal"
                ),
                name=name,
                dtype=policy,
            )(x)
            return norm(f"{name}_norm", 1e-5)(x)

        def attention(stage: int, name: str) -> CosineAttention:
            options: dict[str, Any] = {
                "num_heads": num_heads[stage],
                "num_shared_heads": num_shared_heads[stage],
                "top_k": top_k[stage],
                "pretrain_size": (pretrain_size or image_size) // REDUCTIONS[stage],
                "balance_loss_weight": weight,
                "name": name,
                "dtype": policy,
            }
            if stage == STAGES - 1:
                return CosineAttention(**options)
            ratio = pool_ratios[stage]
            return AggregatedAttention(window_size=window_size, pool_ratio=ratio, **options)

        def gated_mlp(x: Any, stage: int, name: str) -> Any:
            """Of two halves, one sees its neighbours and gates the other."""
            width = 2 * int(hidden_sizes[stage] * mlp_ratios[stage]) // 3
            seeing, gated = ops.split(dense(2 * width, f"{name}_1")(x), 2, axis=-1)
            seeing = keras.layers.DepthwiseConv2D(
                3,
                padding="same",
                data_format="channels_last",
                depthwise_initializer=keras.initializers.RandomNormal(stddev=math.sqrt(2 / 9)),
                name=f"{name}_convolution",
                dtype=policy,
            )(seeing)
            return dense(hidden_sizes[stage], f"{name}_2")(ops.gelu(seeing, False) * gated)

        images = x = keras.Input((image_size, image_size, num_channels), name="images")
        for stage in range(STAGES):
            x = embedding(x, stage)
            for i in range(depths[stage]):
                block, rate = f"block_{stage + 1}_{i}", next(rates)
                branch = attention(stage, f"{block}_attention")(norm(f"{block}_norm_1")(x))
                x = x + drop_path(branch, rate, f"{block}_drop_path_1", policy)
                branch = gated_mlp(norm(f"{block}_norm_2")(x), stage, f"{block}_mlp")
                x = x + drop_path(branch, rate, f"{block}_drop_path_2", policy)
            x = norm(f"norm_{stage + 1}")(x)
        logits = dense(num_classes, "head")(ops.mean(x, axis=(1, 2)))

        super().__init__(inputs=images, outputs=logits, name=name)
        self.dtype_policy = policy
        self._arguments: dict[str, Any] = {
            "image_size": image_size,
            "num_classes": num_classes,
            "hidden_sizes": hidden_sizes,
            "depths": depths,
            "num_heads": num_heads,
            "num_shared_heads": num_shared_heads,
            "top_k": top_k,
            "mlp_ratios": tuple(mlp_ratios),
            "window_size": window_size,
            "pool_ratios": pool_ratios,
            "pretrain_size": pretrain_size,
            "num_channels": num_channels,
            "drop_path_rate": drop_path_rate,
            "balance_loss_weight": balance_loss_weight,
        }

    @classmethod
    def from_name(
        cls, name: str, image_size: int = 224, num_classes: int = 1000, **kwargs: Any
    ) -> MoHTransNeXt:
        """One of the authors' models, with new weights.

        Args:
            name: `"small-75"`, `"small-80"`, `"base-75"` or `"base-50"`: the size, and the percent
                of heads that are active.
            image_size: As of the class. Defaults to 224.
            num_classes: As of the class. Defaults to 1000.
            **kwargs: Further arguments of the class.

        Raises:
            ValueError: if there is no such name.
        """
        if name not in NAMES:
            raise invalid_argument("name", f"one of {', '.join(map(repr, NAMES))}", name)
        return cls(image_size, num_classes, **{**NAMES[name], **kwargs})

    def load_official(self, path: str | Path) -> None:
        """Load a checkpoint of the authors' MoH-ViT, or one made by their training program.

        A file is read as weights only: what could run code is refused. For images of another size
        than those of the pretraining, give the class `pretrain_size`, the authors' 224.

        Args:
            path: The file, `.pth` or `.pt`, which needs PyTorch (`pip install keras-moh[torch]`) on
                every backend, or `.safetensors` with the same names, which needs nothing.

        Raises:
            FileNotFoundError: if there is no such file.
            ImportError: if PyTorch is needed and is not installed.
            ValueError: if the file is no file of weights, or a weight is missing, unexpected or of
                another shape: all are listed, and the model is left as it was.
        """
        weights = checkpoints.read_checkpoint(path, ("model",))
        checkpoints.fill(self._places(), weights, f"of this {type(self).__name__}")

    def _places(self) -> list[checkpoints.Place]:
        """Where each weight of the authors' `state_dict` belongs."""
        layer = self.get_layer
        places = checkpoints.linear("head", layer("head"))
        for stage, depth in enumerate(self._arguments["depths"], start=1):
            embedding = f"patch_embedding_{stage}"
            places += [
                *checkpoints.convolution(f"patch_embed{stage}.proj", layer(embedding)),
                *checkpoints.layer_norm(f"patch_embed{stage}.norm", layer(f"{embedding}_norm")),
                *checkpoints.layer_norm(f"norm{stage}", layer(f"norm_{stage}")),
            ]
            for i in range(depth):
                theirs, ours = f"block{stage}.{i}", f"block_{stage}_{i}"
                places += [
                    *checkpoints.layer_norm(f"{theirs}.norm1", layer(f"{ours}_norm_1")),
                    *checkpoints.layer_norm(f"{theirs}.norm2", layer(f"{ours}_norm_2")),
                    *attention_places(f"{theirs}.attn.", layer(f"{ours}_attention")),
                    *checkpoints.linear(f"{theirs}.mlp.fc1", layer(f"{ours}_mlp_1")),
                    *checkpoints.convolution(
                        f"{theirs}.mlp.dwconv.dwconv", layer(f"{ours}_mlp_convolution")
                    ),
                    *checkpoints.linear(f"{theirs}.mlp.fc2", layer(f"{ours}_mlp_2")),
                ]
        return places

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        dtype = keras.dtype_policies.serialize(self.dtype_policy)
        return {**self._arguments, "dtype": dtype, "name": self.name}


def attention_places(prefix: str, layer: CosineAttention) -> list[checkpoints.Place]:
    """Where the authors' weights of an attention layer belong, by their names after `prefix`."""
    linear, array, heads = checkpoints.linear, checkpoints.array, layer.num_heads
    places = [
        array(f"{prefix}temperature", layer.temperature, (heads, 1, 1)),
        array(
            f"{prefix}query_embedding",
            layer.query_embedding,
            (heads, 1, layer.query_embedding.shape[-1]),
        ),
        *linear(f"{prefix}proj", layer.output_dense),
        *linear(f"{prefix}cpb_fc1", layer.bias_dense_1),
        *linear(f"{prefix}cpb_fc2", layer.bias_dense_2),
        *checkpoints.router(prefix, layer.router),
    ]
    keys_and_values = [layer.key_dense, layer.value_dense]
    if not isinstance(layer, AggregatedAttention):
        return [
            *places,
            *checkpoints.stacked(f"{prefix}qkv", [layer.query_dense, *keys_and_values]),
        ]
    cells = layer.window_size**2
    return [
        *places,
        *linear(f"{prefix}q", layer.query_dense),
        *checkpoints.stacked(f"{prefix}kv", keys_and_values),
        *checkpoints.patches(f"{prefix}sr", layer.pool_dense, 1),
        *checkpoints.layer_norm(f"{prefix}norm", layer.pool_norm),
        array(f"{prefix}relative_pos_bias_local", layer.window_bias),
        array(f"{prefix}learnable_tokens", layer.window_vectors),
        array(f"{prefix}learnable_bias", layer.window_weights, (heads, 1, cells)),
    ]


def _check_sizes(image_size: Any, pretrain_size: Any) -> None:
    last = REDUCTIONS[-1]
    for name, size in (("image_size", image_size), ("pretrain_size", pretrain_size)):
        if not isinstance(size, int) or size < last or size % last:
            raise invalid_argument(name, f"a multiple of {last}", size)
    if pretrain_size == last:
        name = "image_size" if image_size == pretrain_size else "pretrain_size"
        raise invalid_argument(
            name,
            f"at least {2 * last}: at {last} the last grid is a single token, which has no "
            "distances, and they would be 0 / 0",
            pretrain_size,
        )
