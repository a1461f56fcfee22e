r"""The two attention layers of TransNeXt (arXiv 2311.17132), with the paper's gates.

Queries and keys are cosines of a learned temperature, and every head has a bias for each distance
between a query and a key. With unit vectors $\hat q, \hat k$ and `n` keys,

$$ s_{ij} = (\hat q_i + e) \cdot \hat k_j \; \mathrm{softplus}(\tau) \log n + b_{ij}. $$

The bias is a function of both positions that no product of a query and a key gives, so this is not
`routed_attention`: every head is computed and then gated, as in the authors' code. The heads and
their gates are the package's `TwoStageRouter`'s.

Inputs are grids `(B, h, w, D)` of tokens: a token attends to neighbours by its place in it.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_moh.errors import boolean, integer, invalid_argument, number_in
from keras_moh.heads import dense_gates, taken_heads
from keras_moh.models.parts import check_multiple, truncated_normal
from keras_moh.routing import TwoStageRouter, load_balancing_loss, routing_dtype
from keras_moh.softmax import softmax

# softplus of it is 1 / 0.24, where the temperature starts.
TEMPERATURE = math.log(math.exp(1 / 0.24) - 1)
# Of the network that makes the bias of two coordinates.
BIAS_UNITS = 512


def average_pooling(length: int, pooled: int) -> np.ndarray:
    """The matrix `(pooled, length)` that averages cell by cell, as adaptive pooling does.

    Cell `i` covers positions from `i * length / pooled`, rounded down, to `(i + 1) * length /
    pooled`, rounded up.
    """
    matrix = np.zeros((pooled, length))
    for i in range(pooled):
        first, last = i * length // pooled, -(-(i + 1) * length // pooled)
        matrix[i, first:last] = 1 / (last - first)
    return matrix


def relative_coordinates(
    size: tuple[int, int], pooled: tuple[int, int], pretrain_size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The distances between cells of a grid and those of it pooled, on a logarithmic scale.

    They are in units of an eighth of the grid that the model was pretrained with.

    Returns:
        The different ones, `(U, 2)`, and which of them each pair has, `(h * w, pooled h * w)`.
    """
    axes = []
    for length, cells, unit in zip(size, pooled, pretrain_size, strict=True):
        positions = np.arange(length)
        centres = average_pooling(length, cells) @ positions
        axes.append((positions[:, np.newaxis] - centres) / (unit - 1) * 8)
    rows, columns = np.broadcast_arrays(
        axes[0][:, np.newaxis, :, np.newaxis], axes[1][np.newaxis, :, np.newaxis, :]
    )
    # In float32, so that distances that differ by a rounding error are one.
    pairs = np.stack([rows, columns], axis=-1).reshape(-1, 2).astype("float32")
    different, which = np.unique(pairs, axis=0, return_inverse=True)
    scaled = np.sign(different) * np.log2(np.abs(different) + 1) / np.log2(8)
    shape = (math.prod(size), math.prod(pooled))
    return scaled.astype("float32"), which.reshape(shape).astype("int32")


def unit_vectors(x: Any) -> Any:
    """The vectors `(..., d)` by their lengths; those of length 0 as they are."""
    squares = ops.sum(ops.square(x), axis=-1, keepdims=True)
    return x * ops.rsqrt(ops.maximum(squares, 1e-24))


@keras.saving.register_keras_serializable(package="keras_moh")
class CosineAttention(keras.layers.Layer):
    """Attention of every token of a grid to all others, by cosines and distances.

    Args:
        num_heads: Number of heads `H`, a divisor of the features `D`.
        num_shared_heads: Number of heads that every token takes.
        top_k: Number of routed heads that a token takes beside them.
        pretrain_size: Height and width of the grid of the pretraining, at least 2. Defaults to the
            grid's own.
        use_bias: Whether queries, keys and values have biases. Defaults to `True`.
        balance_loss_weight: Weight of the load-balancing loss, added in training. Defaults to 0.01.
        **kwargs: `name`, `trainable`, `dtype` of `keras.layers.Layer`.

    Call arguments:
        inputs: `(B, h, w, D)`, of the height and width that the layer was built for.
        training: Whether to add the loss.

    Returns:
        `(B, h, w, D)`.

    Raises:
        ValueError: for an argument out of its range, or a grid that gives no distances.

    Example:
    >>> import numpy as np
    >>> from keras_moh.models.cosine_attention import CosineAttention
    >>> layer = CosineAttention(num_heads=4, num_shared_heads=1, top_k=2)
    >>> tuple(layer(np.ones((2, 3, 5, 16), "float32")).shape)
    (2, 3, 5, 16)
    """

    def __init__(
        self,
        num_heads: int,
        num_shared_heads: int,
        top_k: int,
        pretrain_size: int | None = None,
        use_bias: bool = True,
        balance_loss_weight: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.num_heads = integer("num_heads", num_heads, 1)
        self.pretrain_size = pretrain_size
        self.use_bias = boolean("use_bias", use_bias)
        self.balance_loss_weight = number_in("balance_loss_weight", balance_loss_weight, 0)
        self.router = TwoStageRouter(
            num_heads,
            num_shared_heads,
            top_k,
            kernel_initializer=truncated_normal(),
            dtype=self.dtype_policy,
            name="router",
        )

    def build(self, input_shape: Any) -> None:
        """Create the weights for a grid `(B, h, w, D)`."""
        _, *size, features = input_shape
        check_multiple("features", features, "num_heads", self.num_heads)
        self._size, self._head_dim = (size[0], size[1]), features // self.num_heads
        self.query_dense = self._dense("query", features)
        self.key_dense = self._dense("key", features)
        self.value_dense = self._dense("value", features)
        self.output_dense = self._dense("attention_output", features, use_bias=True)
        self.bias_dense_1 = self._dense("bias_1", BIAS_UNITS, "relu", use_bias=True)
        self.bias_dense_2 = self._dense("bias_2", self.num_heads, use_bias=True)
        for dense in (self.query_dense, self.key_dense, self.value_dense, self.output_dense):
            dense.build(input_shape)
        self.bias_dense_1.build((None, 2))
        self.bias_dense_2.build((None, BIAS_UNITS))
        self.router.build(input_shape)
        self.temperature = self.add_weight(
            name="temperature",
            shape=(self.num_heads, 1),
            initializer=keras.initializers.Constant(TEMPERATURE),
        )
        self.query_embedding = self.add_weight(
            name="query_embedding",
            shape=(self.num_heads, self._head_dim),
            initializer=truncated_normal(),
        )
        pretrain_size = self._size if self.pretrain_size is None else (self.pretrain_size,) * 2
        if min(pretrain_size) < 2:
            raise invalid_argument(
                "pretrain_size", "a grid of at least 2 x 2 cells, to have distances", pretrain_size
            )
        self._coordinates, self._which = relative_coordinates(
            self._size, self._pooled_size(), pretrain_size
        )

    def _dense(
        self, name: str, units: int, activation: Any = None, use_bias: bool | None = None
    ) -> keras.layers.Dense:
        return keras.layers.Dense(
            units,
            activation=activation,
            use_bias=self.use_bias if use_bias is None else use_bias,
            kernel_initializer=truncated_normal(),
            dtype=self.dtype_policy,
            name=name,
        )

    def _pooled_size(self) -> tuple[int, int]:
        return self._size

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """The attention's output `(B, h, w, D)`; see the class."""
        queries = unit_vectors(self._heads(self.query_dense(inputs)))
        outputs = self._attend(inputs, queries)  # (B, N, H, d)
        routing = self.router(inputs)
        gates = dense_gates(routing.heads, routing.gates, self.num_heads)
        if training and self.router.top_k and self.balance_loss_weight:
            taken = taken_heads(routing.heads, self.num_heads)[..., self.router.num_shared_heads :]
            loss = load_balancing_loss(routing.probabilities, taken)
            self.add_loss(self.balance_loss_weight * loss)
        outputs = ops.reshape(outputs, (-1, *self._size, self.num_heads, self._head_dim))
        gated = ops.expand_dims(ops.cast(gates, outputs.dtype), -1) * outputs
        shape = (-1, *self._size, self.num_heads * self._head_dim)
        return self.output_dense(ops.cast(ops.reshape(gated, shape), inputs.dtype))

    def _attend(self, inputs: Any, queries: Any) -> Any:
        """The outputs of all heads `(B, N, H, d)` for unit queries."""
        keys = unit_vectors(self._heads(self.key_dense(inputs)))
        values = self._heads(self.value_dense(inputs))
        scores = ops.einsum("bnhd,bmhd->bnhm", self._scaled(queries, self._which.shape[1]), keys)
        return ops.einsum("bnhm,bmhd->bnhd", softmax(scores + self._distance_bias()), values)

    def _heads(self, x: Any) -> Any:
        """`(B, ..., D)` as `(B, N, H, d)`, in float32 at least: cosines are worth their digits."""
        x = ops.cast(x, routing_dtype(self.compute_dtype))
        return ops.reshape(x, (-1, math.prod(x.shape[1:-1]), self.num_heads, self._head_dim))

    def _scaled(self, queries: Any, num_keys: Any) -> Any:
        """Queries with embedding and temperature, for a softmax over so many keys."""
        dtype = queries.dtype
        temperature = ops.softplus(ops.cast(self.temperature, dtype))
        scale = ops.convert_to_tensor(np.log(num_keys), dtype=dtype)
        return (queries + ops.cast(self.query_embedding, dtype)) * temperature * scale

    def _distance_bias(self) -> Any:
        """`(N, H, M)`, of queries and keys."""
        bias = self.bias_dense_2(self.bias_dense_1(ops.convert_to_tensor(self._coordinates)))
        bias = ops.cast(bias, routing_dtype(self.compute_dtype))
        return ops.transpose(ops.take(bias, self._which, axis=0), (0, 2, 1))

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "num_shared_heads": self.router.num_shared_heads,
            "top_k": self.router.top_k,
            "pretrain_size": self.pretrain_size,
            "use_bias": self.use_bias,
            "balance_loss_weight": self.balance_loss_weight,
        }


@keras.saving.register_keras_serializable(package="keras_moh")
class AggregatedAttention(CosineAttention):
    """Attention of every token of a grid to its neighbours, and to the grid pooled, together.

    The neighbours are the cells of a window around the token, inside the grid. One softmax is over
    both kinds. To the weight of each neighbour comes one that does not compete: the cosine of the
    query with a learned vector for this cell of the window.

    Args:
        num_heads: As of `CosineAttention`, and so the further arguments.
        num_shared_heads: As of `CosineAttention`.
        top_k: As of `CosineAttention`.
        window_size: Height and width of the window, an odd number. Defaults to 3.
        pool_ratio: Height and width of the grid by those of the grid pooled. Defaults to 2.
        **kwargs: Further arguments of `CosineAttention`.

    Call arguments:
        inputs: As of `CosineAttention`.
        training: As of `CosineAttention`.

    Returns:
        `(B, h, w, D)`.

    Raises:
        ValueError: as `CosineAttention`, or if nothing would be left of the grid pooled.

    Example:
    >>> import numpy as np
    >>> from keras_moh.models.cosine_attention import AggregatedAttention
    >>> layer = AggregatedAttention(num_heads=4, num_shared_heads=1, top_k=2, pool_ratio=2)
    >>> tuple(layer(np.ones((2, 4, 6, 16), "float32")).shape)
    (2, 4, 6, 16)
    """

    def __init__(
        self,
        num_heads: int,
        num_shared_heads: int,
        top_k: int,
        window_size: int = 3,
        pool_ratio: int = 2,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_heads, num_shared_heads, top_k, **kwargs)
        self.window_size = integer("window_size", window_size, 1)
        if self.window_size % 2 == 0:
            raise invalid_argument("window_size", "an odd integer", window_size)
        self.pool_ratio = integer("pool_ratio", pool_ratio, 1)

    def build(self, input_shape: Any) -> None:
        """Create the weights for a grid `(B, h, w, D)`."""
        super().build(input_shape)
        cells = self.window_size**2
        self.pool_dense = self._dense("pool", input_shape[-1], "gelu", use_bias=True)
        self.pool_dense.build(input_shape)
        self.pool_norm = keras.layers.LayerNormalization(
            epsilon=1e-5, dtype=self.dtype_policy, name="pool_norm"
        )
        self.pool_norm.build(input_shape)
        self.window_bias = self.add_weight(
            name="window_bias",
            shape=(self.num_heads, cells),
            initializer=keras.initializers.TruncatedNormal(stddev=0.0004),
        )
        self.window_vectors = self.add_weight(
            name="window_vectors",
            shape=(self.num_heads, self._head_dim, cells),
            initializer=truncated_normal(),
        )
        self.window_weights = self.add_weight(
            name="window_weights", shape=(self.num_heads, cells), initializer="zeros"
        )
        # (N, cells): whether a cell of a token's window is inside the grid.
        ones = np.ones((1, *self._size, 1, 1), bool)
        padded = np.pad(ones, self._padding())
        self._inside = np.stack(self._shifted(padded), axis=-1).reshape(-1, cells)
        self._pooling = [
            average_pooling(*lengths).astype("float32")
            for lengths in zip(self._size, self._pooled_size(), strict=True)
        ]

    def _pooled_size(self) -> tuple[int, int]:
        height, width = (length // self.pool_ratio for length in self._size)
        if not height or not width:
            raise invalid_argument(
                "pool_ratio", f"at most the grid's height and width {self._size}", self.pool_ratio
            )
        return height, width

    def _attend(self, inputs: Any, queries: Any) -> Any:
        """The outputs of all heads `(B, N, H, d)` for unit queries."""
        dtype = queries.dtype
        keys = self._windows(unit_vectors(self._heads(self.key_dense(inputs))))
        values = self._windows(self._heads(self.value_dense(inputs)))
        pooled = self._pooled(inputs)
        pooled_keys = unit_vectors(self._heads(self.key_dense(pooled)))
        pooled_values = self._heads(self.value_dense(pooled))

        num_keys = self._inside.sum(-1) + self._which.shape[1]
        scaled = self._scaled(queries, num_keys[:, np.newaxis, np.newaxis])
        near = ops.einsum("bnhd,bnkhd->bnhk", scaled, keys) + ops.cast(self.window_bias, dtype)
        near = ops.where(self._inside[:, np.newaxis, :], near, -np.inf)
        far = ops.einsum("bnhd,bmhd->bnhm", scaled, pooled_keys) + self._distance_bias()
        weights = softmax(ops.concatenate([near, far], axis=-1))

        cells = self.window_size**2
        own = ops.einsum("bnhd,hdk->bnhk", queries, ops.cast(self.window_vectors, dtype))
        own = own + ops.cast(self.window_weights, dtype) + weights[..., :cells]
        near = ops.einsum("bnhk,bnkhd->bnhd", own, values)
        return near + ops.einsum("bnhm,bmhd->bnhd", weights[..., cells:], pooled_values)

    def _pooled(self, inputs: Any) -> Any:
        """The pooled grid's tokens `(B, M, D)`."""
        rows, columns = (ops.cast(matrix, inputs.dtype) for matrix in self._pooling)
        pooled = ops.einsum("bhwc,ph,qw->bpqc", self.pool_dense(inputs), rows, columns)
        return self.pool_norm(ops.reshape(pooled, (-1, self._which.shape[1], pooled.shape[-1])))

    def _windows(self, x: Any) -> Any:
        """`(B, N, H, d)` as the neighbours of each token, `(B, N, cells, H, d)`, 0 outside."""
        grid = ops.reshape(x, (-1, *self._size, *x.shape[2:]))
        shifted = self._shifted(ops.pad(grid, self._padding()))
        windows = ops.stack(shifted, axis=3)
        return ops.reshape(windows, (-1, math.prod(self._size), *windows.shape[3:]))

    def _padding(self) -> list[list[int]]:
        reach = self.window_size // 2
        return [[0, 0], [reach, reach], [reach, reach], [0, 0], [0, 0]]

    def _shifted(self, padded: Any) -> list[Any]:
        """A padded grid as seen from each cell of the window, row by row."""
        height, width = self._size
        size = range(self.window_size)
        return [padded[:, i : i + height, j : j + width] for i in size for j in size]

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        own = {"window_size": self.window_size, "pool_ratio": self.pool_ratio}
        return {**super().get_config(), **own}
