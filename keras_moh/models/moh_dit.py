"""`MoHDiT`: the paper's diffusion transformer, class-conditional, with the authors' weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moh.errors import boolean, integer, invalid_argument, number_in
from keras_moh.models import checkpoints
from keras_moh.models.parts import (
    GridPositions,
    PositionEmbedding,
    by_layer,
    check_multiple,
    images_of,
    loss_weight,
    patches,
    routed_by_layer,
)
from keras_moh.moh_attention import MoHAttention

# Depth, width, and the features of a head where the numbers of heads differ from layer to layer.
SIZES: dict[str, dict[str, Any]] = {
    "S": {"depth": 12, "hidden_size": 384},
    "B": {"depth": 12, "hidden_size": 768},
    "L": {"depth": 24, "hidden_size": 1024, "key_dim": 64},
    "XL": {"depth": 28, "hidden_size": 1152, "key_dim": 72},
}
# Heads, shared heads and routed heads taken, of so many layers, one line after the other.
HEADS = {
    ("S", "90"): [(8, 6, 3, 2), (4, 6, 6, 0)],
    ("S", "75"): [(2, 6, 2, 1), (4, 6, 3, 1), (4, 6, 3, 2), (2, 6, 6, 0)],
    ("B", "90"): [(5, 12, 6, 4), (5, 12, 7, 4), (2, 12, 12, 0)],
    ("B", "75"): [(2, 12, 4, 2), (8, 12, 6, 3), (2, 12, 12, 0)],
    ("L", "90"): [(8, 8, 8, 0), (8, 16, 16, 0), (8, 24, 16, 3)],
    ("L", "75"): [(8, 8, 8, 0), (8, 16, 8, 4), (8, 24, 12, 4)],
    ("XL", "90"): [(9, 8, 8, 0), (10, 16, 16, 0), (9, 24, 16, 3)],
    ("XL", "75"): [(9, 8, 8, 0), (10, 16, 10, 2), (9, 24, 14, 2)],
}
NAME = re.compile(r"(?:MoH-DiT-)?(S|B|L|XL)/(2|4|8)-(90|75)")

# The authors guide three channels only, "for exact reproducibility" of the first DiT.
GUIDED_CHANNELS = 3


@keras.saving.register_keras_serializable(package="keras_moh")
class MoHDiT(keras.Model):
    r"""The diffusion transformer DiT with Mixture-of-Head attention, MoH-DiT (arXiv 2410.11842).

    It is given an image with noise, how much of it (the step `t` of the diffusion), and a class,
    and predicts the noise and, with `learn_sigma`, where between its bounds the variance of a step
    back lies (arXiv 2212.09748). Images are patches with frozen 2-D sines and cosines; step and
    class together scale, shift and gate every layer (adaLN-Zero). A new model gives zeros.

    `DiffusionTrainer` trains it, `DiffusionSampler` draws images with it.

    Args:
        image_size: Height and width of the images, or latents, a multiple of `patch_size`.
        patch_size: Height and width of a patch.
        num_classes: Number of classes. Class `num_classes` is none: no class is known.
        hidden_size: Features `D` of a token, a multiple of 4.
        depth: Number of layers.
        num_heads: Number of attention heads: one number, or a list with one for each layer.
        num_shared_heads: Of these, the heads that every token takes, likewise. Required unless
            `router` is `None`.
        top_k: Routed heads that a token takes beside them, likewise; 0 where all are shared.
            Required unless `router` is `None`.
        key_dim: Features of a head. Defaults to `hidden_size // num_heads` of the layer.
        mlp_ratio: Width of the hidden layer of each MLP by `hidden_size`. Defaults to 4.
        num_channels: Channels `C` of the images. Defaults to 4, those of the usual latents.
        learn_sigma: Whether variances are predicted too. Defaults to `True`.
        label_dropout: Rate in `[0, 1)` at which classes are made none in training, as guidance
            needs it; with 0 there is no such class. Defaults to 0.1.
        balance_loss_weight: Weight of the load-balancing loss, averaged over the routed layers.
            Defaults to 0.01.
        router: As of `MoHAttention`, by name. With `None` this is the plain DiT, of multi-head
            attention. Defaults to `"two_stage"`.
        dtype: Dtype or policy of the layers. Defaults to Keras's global policy.
        name: Name of the model.

    Call arguments:
        inputs: A dict of `images (B, image_size, image_size, C)`, float, `times (B,)`, the steps,
            and `labels (B,)`, both integers.
        training: Whether to make classes none and to add the losses.

    Returns:
        `(B, image_size, image_size, C)`, or `2 * C` channels with `learn_sigma`.

    Raises:
        ValueError: for an argument out of its range, or numbers of heads that do not fit.

    Example:
    >>> import numpy as np, keras_moh
    >>> model = keras_moh.models.MoHDiT(
    ...     image_size=8, patch_size=2, num_classes=5, hidden_size=32, depth=2, num_heads=4,
    ...     num_shared_heads=[4, 2], top_k=[0, 1],
    ... )
    >>> inputs = {
    ...     "images": np.zeros((3, 8, 8, 4), "float32"),
    ...     "times": np.array([0, 37, 999]),
    ...     "labels": np.array([1, 4, 5]),
    ... }
    >>> tuple(model(inputs).shape)
    (3, 8, 8, 8)
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        num_classes: int,
        hidden_size: int,
        depth: int,
        num_heads: int | Sequence[int],
        num_shared_heads: int | Sequence[int] | None = None,
        top_k: int | Sequence[int] | None = None,
        key_dim: int | None = None,
        mlp_ratio: float = 4.0,
        num_channels: int = 4,
        learn_sigma: bool = True,
        label_dropout: float = 0.1,
        balance_loss_weight: float = 0.01,
        router: str | None = "two_stage",
        dtype: Any = None,
        name: str | None = None,
    ) -> None:
        depth = integer("depth", depth, 1)
        num_heads = by_layer("num_heads", num_heads, depth, 1)
        if router is not None and not isinstance(router, str):
            raise invalid_argument("router", "the name of a router, or None", router)
        shared_by_layer = routed_by_layer("num_shared_heads", num_shared_heads, depth, router)
        top_k_by_layer = routed_by_layer("top_k", top_k, depth, router)
        check_multiple("image_size", image_size, "patch_size", patch_size)
        if integer("hidden_size", hidden_size, 1) % 4:
            raise invalid_argument("hidden_size", "a multiple of 4", hidden_size)
        policy = keras.dtype_policies.get(dtype)

        def dense(units: int, name: str, **options: Any) -> keras.layers.Dense:
            return keras.layers.Dense(units, name=name, dtype=policy, **options)

        def zero_dense(units: int, name: str) -> keras.layers.Dense:
            return dense(units, name, kernel_initializer="zeros")

        def modulated(x: Any, shift: Any, scale: Any, name: str) -> Any:
            norm = keras.layers.LayerNormalization(
                epsilon=1e-6, center=False, scale=False, name=name, dtype=policy
            )
            return norm(x) * (1 + scale) + shift

        images = keras.Input((image_size, image_size, num_channels), name="images")
        times = keras.Input((), name="times", dtype="int32")
        labels = keras.Input((), name="labels", dtype="int32")

        x = dense(hidden_size, "patch_embedding")(patches(images, patch_size))
        x = PositionEmbedding(
            GridPositions(), name="position_embedding", trainable=False, dtype=policy
        )(x)
        small = keras.initializers.RandomNormal(stddev=0.02)
        time = dense(
            hidden_size,
            "time_embedding_1",
            activation="silu",
            kernel_initializer=small,
        )(waves(times))
        time = dense(hidden_size, "time_embedding_2", kernel_initializer=small.clone())(time)
        known = LabelDropout(num_classes, label_dropout, name="label_dropout")(labels)
        label = keras.layers.Embedding(
            num_classes + (label_dropout > 0),
            hidden_size,
            embeddings_initializer=small.clone(),
            name="label_embedding",
            dtype=policy,
        )(known)
        condition = ops.expand_dims(ops.silu(time + label), 1)

        for i in range(depth):
            modulation = zero_dense(6 * hidden_size, f"block_{i}_modulation")(condition)
            shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = ops.split(modulation, 6, axis=-1)
            attention = MoHAttention(
                num_heads[i],
                key_dim or hidden_size // num_heads[i],
                num_shared_heads=shared_by_layer[i],
                top_k=top_k_by_layer[i],
                router=router,
                balance_loss_weight=loss_weight(balance_loss_weight, top_k_by_layer),
                name=f"block_{i}_attention",
                dtype=policy,
            )
            x = x + gate * attention(modulated(x, shift, scale, f"block_{i}_norm_1"))
            branch = modulated(x, mlp_shift, mlp_scale, f"block_{i}_norm_2")
            branch = dense(int(hidden_size * mlp_ratio), f"block_{i}_mlp_1")(branch)
            branch = ops.gelu(branch, approximate=True)
            branch = dense(hidden_size, f"block_{i}_mlp_2")(branch)
            x = keras.layers.Add(name=f"block_{i}", dtype=policy)([x, mlp_gate * branch])
        modulation = zero_dense(2 * hidden_size, "final_modulation")(condition)
        shift, scale = ops.split(modulation, 2, axis=-1)
        x = modulated(x, shift, scale, "final_norm")
        channels = (1 + boolean("learn_sigma", learn_sigma)) * num_channels
        x = zero_dense(patch_size**2 * channels, "final")(x)
        side = image_size // patch_size
        outputs = images_of(x, side, side, patch_size)

        inputs = {"images": images, "times": times, "labels": labels}
        super().__init__(inputs=inputs, outputs=outputs, name=name)
        self.dtype_policy = policy
        self.image_size = image_size
        self.num_classes = num_classes
        self.num_channels = num_channels
        self.learn_sigma = learn_sigma
        self.knows_none = label_dropout > 0
        self._arguments: dict[str, Any] = {
            "image_size": image_size,
            "patch_size": patch_size,
            "num_classes": num_classes,
            "hidden_size": hidden_size,
            "depth": depth,
            "num_heads": num_heads,
            "num_shared_heads": num_shared_heads,
            "top_k": top_k,
            "key_dim": key_dim,
            "mlp_ratio": mlp_ratio,
            "num_channels": num_channels,
            "learn_sigma": learn_sigma,
            "label_dropout": label_dropout,
            "balance_loss_weight": balance_loss_weight,
            "router": router,
        }

    @classmethod
    def from_name(
        cls, name: str, image_size: int = 32, num_classes: int = 1000, **kwargs: Any
    ) -> MoHDiT:
        """A model of the authors' sizes, with new weights.

        Args:
            name: Size, patch size and share of active heads, like `"XL/2-90"` or `"S/4-75"`: of S,
                B, L, XL; of 2, 4, 8; of 90, 75. The authors have those of patch size 2. The shares
                are rounded: S/2-90 has 88.9 % of its heads active.
            image_size: As of the class. Defaults to 32, the latents of an image of 256 x 256.
            num_classes: As of the class. Defaults to 1000.
            **kwargs: Further arguments of the class.

        Raises:
            ValueError: if there is no such name, or with `router=None`: the sizes are those of
                routers.

        Example:
        >>> import keras_moh
        >>> model = keras_moh.models.MoHDiT.from_name("S/8-75", num_classes=10)
        >>> [layer.num_active_heads for layer in model.layers if "attention" in layer.name]
        [3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6]
        """
        found = NAME.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            valid = "a size S, B, L or XL, a patch size 2, 4 or 8, and 90 or 75, like 'XL/2-90'"
            raise invalid_argument("name", valid, name)
        if kwargs.get("router", "two_stage") is None:
            expected = "the name of a router; a model without is made by the class itself"
            raise invalid_argument("router", expected, None)
        size, patch_size, share = found.groups()
        layers = [numbers for count, *numbers in HEADS[size, share] for _ in range(count)]
        num_heads, num_shared_heads, top_k = map(list, zip(*layers, strict=True))
        return cls(
            image_size,
            int(patch_size),
            num_classes,
            num_heads=num_heads,
            num_shared_heads=num_shared_heads,
            top_k=top_k,
            **SIZES[size],
            **kwargs,
        )

    def guided(self, inputs: dict[str, Any], scale: Any) -> Any:
        """The prediction with classifier-free guidance (arXiv 2207.12598).

        The noise of the first three channels is `none + scale * (known - none)`, where `known` is
        predicted with the class and `none` without; so in the authors' code, although latents have
        four channels. The other channels are those of `known`.

        Args:
            inputs: As of a call.
            scale: How far to go, a number or a scalar tensor: 0 is without the class, 1 with it.

        Returns:
            As of a call.

        Raises:
            ValueError: if the model knows no class that is none, having no `label_dropout`.
        """
        if not self.knows_none:
            raise ValueError(
                "Guidance needs a model that knows the class that is none, with a `label_dropout` "
                "above 0. Received: label_dropout=0"
            )
        none = ops.full_like(inputs["labels"], self.num_classes)
        labels = {"labels": ops.concatenate([inputs["labels"], none])}
        twice = {name: ops.concatenate([inputs[name]] * 2) for name in ("images", "times")}
        known, none = ops.split(self(twice | labels, training=False), 2)
        count = min(GUIDED_CHANNELS, self.num_channels)
        scale = ops.cast(scale, known.dtype)
        guided = none[..., :count] + scale * (known[..., :count] - none[..., :count])
        return ops.concatenate([guided, known[..., count:]], axis=-1)

    def load_official(self, path: str | Path) -> None:
        """Load a checkpoint of the authors' MoH-DiT, or one made by their training program.

        With `router=None` it is one of the DiT (arXiv 2212.09748), whose names are the same.

        Averaged weights (`ema`) are taken where a file has them beside others. A file is read as
        weights only: what could run code is refused.

        Args:
            path: The file, `.pt` or `.pth`, which needs PyTorch (`pip install keras-moh[torch]`) on
                every backend, or `.safetensors` with the same names, which needs nothing.

        Raises:
            FileNotFoundError: if there is no such file.
            ImportError: if PyTorch is needed and is not installed.
            ValueError: if the file is no file of weights, or a weight is missing, unexpected or of
                another shape: all are listed, and the model is left as it was.
        """
        weights = checkpoints.read_checkpoint(path, ("ema", "model"))
        checkpoints.fill(self._places(), weights, f"of this {type(self).__name__}")

    def _places(self) -> list[checkpoints.Place]:
        """Where each weight of the authors' `state_dict` belongs."""
        linear, layer = checkpoints.linear, self.get_layer
        positions = layer("position_embedding").embeddings
        places = [
            checkpoints.array("pos_embed", positions, (1, *positions.shape)),
            *checkpoints.patches(
                "x_embedder.proj", layer("patch_embedding"), self._arguments["patch_size"]
            ),
            *linear("t_embedder.mlp.0", layer("time_embedding_1")),
            *linear("t_embedder.mlp.2", layer("time_embedding_2")),
            checkpoints.array(
                "y_embedder.embedding_table.weight", layer("label_embedding").embeddings
            ),
            *linear("final_layer.linear", layer("final")),
            *linear("final_layer.adaLN_modulation.1", layer("final_modulation")),
        ]
        for i in range(self._arguments["depth"]):
            attention = layer(f"block_{i}_attention")
            projections = [attention.query_dense, attention.key_dense, attention.value_dense]
            places += [
                *checkpoints.stacked(f"blocks.{i}.attn.qkv", projections),
                *linear(f"blocks.{i}.attn.proj", attention.output_dense, inputs=2),
                *checkpoints.router(f"blocks.{i}.attn.", attention.router),
                *linear(f"blocks.{i}.mlp.fc1", layer(f"block_{i}_mlp_1")),
                *linear(f"blocks.{i}.mlp.fc2", layer(f"block_{i}_mlp_2")),
                *linear(f"blocks.{i}.adaLN_modulation.1", layer(f"block_{i}_modulation")),
            ]
        return places

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        dtype = keras.dtype_policies.serialize(self.dtype_policy)
        return {**self._arguments, "dtype": dtype, "name": self.name}


def waves(times: Any, features: int = 256) -> Any:
    """The cosines and sines `(B, features)` of steps `(B,)`, float32 under every policy.

    In bfloat16 step 999 would be step 1000.
    """
    half = features // 2
    frequencies = np.exp(-np.log(10000.0) * np.arange(half) / half).astype("float32")
    angles = ops.expand_dims(ops.cast(times, "float32"), -1) * frequencies
    return ops.concatenate([ops.cos(angles), ops.sin(angles)], axis=-1)


@keras.saving.register_keras_serializable(package="keras_moh")
class LabelDropout(keras.layers.Layer):
    """Makes classes none in training.

    Args:
        num_classes: Number of classes, and the class that is none.
        rate: Rate in `[0, 1)` of labels that become it.
        seed: Seed, an integer.
        **kwargs: `name` of `keras.layers.Layer`.
    """

    def __init__(
        self, num_classes: int, rate: float, seed: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.num_classes = integer("num_classes", num_classes, 1)
        self.rate = number_in("label_dropout", rate, 0, below=1)
        self.seed = seed
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The labels `(B,)`."""
        if not training or not self.rate:
            return inputs
        drawn = keras.random.uniform(ops.shape(inputs), seed=self.seed_generator)
        return ops.where(drawn < self.rate, ops.full_like(inputs, self.num_classes), inputs)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        own = {"num_classes": self.num_classes, "rate": self.rate, "seed": self.seed}
        return {**super().get_config(), **own}
