"""`MoHViT`: a vision transformer with Mixture-of-Head attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_moh.errors import integer, number_in
from keras_moh.models.parts import (
    ClassToken,
    PositionEmbedding,
    by_layer,
    check_multiple,
    drop_path,
    drop_path_rates,
    loss_weight,
    patches,
    truncated_normal,
)
from keras_moh.moh_attention import MoHAttention


@keras.saving.register_keras_serializable(package="keras_moh")
class MoHViT(keras.Model):
    """A vision transformer, ViT as in DeiT, with Mixture-of-Head attention.

    An image is cut into patches, each a token; a class token stands before them, and its features
    after the last layer are classified (arXiv 2010.11929, 2012.12877). Attention is `MoHAttention`
    in every layer; a layer whose heads are all shared (`top_k` 0) gates its heads, and routes none.

    The paper's own vision models are of another architecture: `MoHTransNeXt`.

    Args:
        image_size: Height and width of the images, a multiple of `patch_size`.
        patch_size: Height and width of a patch.
        num_classes: Number of classes.
        hidden_size: Features `D` of a token, a multiple of `num_heads`. Defaults to 384, ViT-S.
        depth: Number of layers. Defaults to 12.
        num_heads: Number of attention heads of a layer. Defaults to 6.
        num_shared_heads: Of these, the heads that every token takes: one number, or a list with one
            for each layer. Defaults to 2.
        top_k: Routed heads that a token takes beside them, likewise. Defaults to 2.
        mlp_ratio: Width of the hidden layer of each MLP by `hidden_size`. Defaults to 4.
        num_channels: Channels of the images. Defaults to 3.
        drop_path_rate: Rate in `[0, 1)` of stochastic depth in the last layer; in those before it
            rises linearly from 0. Defaults to 0.
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
        ValueError: for an argument out of its range, or numbers of heads that do not fit.

    Example:
    >>> import numpy as np, keras_moh
    >>> model = keras_moh.models.MoHViT(
    ...     image_size=32, patch_size=8, num_classes=10, hidden_size=32, depth=2, num_heads=4,
    ...     num_shared_heads=1, top_k=[1, 2],
    ... )
    >>> tuple(model(np.zeros((3, 32, 32, 3), "float32")).shape)
    (3, 10)
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        num_classes: int,
        hidden_size: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        num_shared_heads: int | Sequence[int] = 2,
        top_k: int | Sequence[int] = 2,
        mlp_ratio: float = 4.0,
        num_channels: int = 3,
        drop_path_rate: float = 0.0,
        balance_loss_weight: float = 0.01,
        dtype: Any = None,
        name: str | None = None,
    ) -> None:
        depth = integer("depth", depth, 1)
        num_shared_heads = by_layer("num_shared_heads", num_shared_heads, depth, 0)
        top_k = by_layer("top_k", top_k, depth, 0)
        check_multiple("image_size", image_size, "patch_size", patch_size)
        check_multiple("hidden_size", hidden_size, "num_heads", num_heads)
        policy = keras.dtype_policies.get(dtype)
        rates = drop_path_rates(number_in("drop_path_rate", drop_path_rate, 0, below=1), depth)

        def dense(units: int, name: str, **options: Any) -> keras.layers.Dense:
            return keras.layers.Dense(units, name=name, dtype=policy, **options)

        def norm(name: str) -> keras.layers.LayerNormalization:
            return keras.layers.LayerNormalization(epsilon=1e-6, name=name, dtype=policy)

        images = keras.Input((image_size, image_size, num_channels), name="images")
        x = dense(hidden_size, "patch_embedding")(patches(images, patch_size))
        x = ClassToken(name="class_token", dtype=policy)(x)
        x = PositionEmbedding(truncated_normal(), name="position_embedding", dtype=policy)(x)
        for i in range(depth):
            attention = MoHAttention(
                num_heads,
                hidden_size // num_heads,
                num_shared_heads=num_shared_heads[i],
                top_k=top_k[i],
                balance_loss_weight=loss_weight(balance_loss_weight, top_k),
                name=f"block_{i}_attention",
                dtype=policy,
            )
            branch = attention(norm(f"block_{i}_norm_1")(x))
            x = x + drop_path(branch, rates[i], f"block_{i}_drop_path_1", policy)
            branch = norm(f"block_{i}_norm_2")(x)
            width = int(hidden_size * mlp_ratio)
            branch = dense(width, f"block_{i}_mlp_1", activation="gelu")(branch)
            branch = dense(hidden_size, f"block_{i}_mlp_2")(branch)
            x = x + drop_path(branch, rates[i], f"block_{i}_drop_path_2", policy)
        logits = dense(num_classes, "head")(norm("norm")(x)[:, 0])

        super().__init__(inputs=images, outputs=logits, name=name)
        self.dtype_policy = policy
        self._arguments: dict[str, Any] = {
            "image_size": image_size,
            "patch_size": patch_size,
            "num_classes": num_classes,
            "hidden_size": hidden_size,
            "depth": depth,
            "num_heads": num_heads,
            "num_shared_heads": num_shared_heads,
            "top_k": top_k,
            "mlp_ratio": mlp_ratio,
            "num_channels": num_channels,
            "drop_path_rate": drop_path_rate,
            "balance_loss_weight": balance_loss_weight,
        }

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        dtype = keras.dtype_policies.serialize(self.dtype_policy)
        return {**self._arguments, "dtype": dtype, "name": self.name}
