"""`RotaryEmbedding`, and how the layer calls it and its like."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_moh import MoHAttention, RotaryEmbedding, implementations
from tests import oracle
from tests.helpers import compiled, gradients, to_numpy
from tests.samples import D, T, floats, moh_attention

B, N, H, d = 2, 5, 3, 6


@keras.saving.register_keras_serializable("keras_moh_tests")
class Recorded(RotaryEmbedding):
    """It keeps the shapes and positions that it is called with."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(50.0, **kwargs)
        self.calls: list[tuple[Any, ...]] = []

    def call(self, inputs: Any, start_index: Any = 0, positions: Any = None) -> Any:
        self.calls.append((tuple(inputs.shape), start_index, positions))
        return super().call(inputs, start_index=start_index, positions=positions)


@pytest.mark.parametrize("waves", [(10000,), (50.0, 4.0)], ids=str)
@pytest.mark.parametrize("start", [0, 7, "tensor"])
def test_against_the_oracle(waves: tuple[float, ...], start: Any) -> None:
    x = floats(B, N, H, d)
    expected = oracle.rotate(x, *waves, start=4 if start == "tensor" else start)
    if start == "tensor":
        start = ops.convert_to_tensor(4, "int32")
    rotary = RotaryEmbedding(*waves)
    found = compiled(lambda x: rotary(x, start_index=start), ops.convert_to_tensor(x))
    np.testing.assert_allclose(to_numpy(found), expected, atol=2e-6)


@pytest.mark.float64
def test_float64_is_float64_throughout() -> None:
    x = floats(B, N, H, d).astype("float64")
    expected = oracle.rotate(x, 500000.0, 8.0, start=1000)
    rotary = RotaryEmbedding(500000.0, 8.0)  # whatever its own policy
    found = to_numpy(rotary(ops.convert_to_tensor(x), start_index=1000))
    assert found.dtype == "float64"
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(dtype: str) -> None:
    """The angles are of float32: at position 4000 those of bfloat16 would say nothing."""
    x = floats(B, N, H, d)
    found = RotaryEmbedding()(ops.convert_to_tensor(x, dtype), start_index=4000)
    assert keras.backend.standardize_dtype(found.dtype) == dtype
    expected = oracle.rotate(x, 10000, start=4000)
    np.testing.assert_allclose(to_numpy(found), expected, atol=4e-2)


def test_positions() -> None:
    x, rotary = floats(B, N, H, d), RotaryEmbedding(50.0)
    whole = to_numpy(rotary(floats(1, 20, H, d) * 0 + 1.0))
    positions = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], "int32")
    ones = np.ones((B, N, H, d), "float32")
    np.testing.assert_allclose(
        to_numpy(rotary(ones, positions=positions)), whole[0][positions], atol=1e-6
    )
    for of_all in (positions[0], positions[:1]):
        found = to_numpy(rotary(x, positions=of_all))
        for b in range(B):
            one = to_numpy(rotary(x[b : b + 1], positions=positions[:1]))
            np.testing.assert_allclose(found[b], one[0], atol=1e-6)
    # Without an axis of heads, and with more axes than one.
    flat = to_numpy(rotary(x[:, :, 0], start_index=2))
    np.testing.assert_allclose(flat, to_numpy(rotary(x, start_index=2))[:, :, 0], atol=1e-6)
    deep = to_numpy(rotary(x[:, :, None], start_index=2))
    np.testing.assert_allclose(deep[:, :, 0], to_numpy(rotary(x, start_index=2)), atol=1e-6)


def test_gradient() -> None:
    """A rotation: its gradient is the rotation back."""
    x, cotangent, rotary = floats(B, N, H, d), floats(B, N, H, d, seed=1), RotaryEmbedding()
    _, (by_x,), _, _ = gradients(lambda x: ops.sum(ops.multiply(rotary(x), cotangent)), [x])
    # Back at position 0 -- t: by the conjugate, which turns with the second half negated.
    sign = np.where(np.arange(d) < d // 2, 1, -1)
    expected = oracle.rotate(cotangent * sign, 10000) * sign
    np.testing.assert_allclose(by_x, expected, atol=2e-6)


def test_only_distances_matter() -> None:
    layer = moh_attention(key_dim=4, rotary_embedding=RotaryEmbedding(50.0))
    plain = moh_attention(key_dim=4)
    x = floats(1, T, D)
    layer.build(x.shape), plain.build(x.shape)
    plain.set_weights(layer.get_weights())
    shifted = np.concatenate([floats(1, 3, D, seed=1), x], axis=1)
    mask = np.arange(T + 3)[None, :] >= 3
    np.testing.assert_allclose(
        to_numpy(layer(shifted, shifted, value_mask=mask))[:, 3:], to_numpy(layer(x)), atol=1e-5
    )
    assert np.abs(to_numpy(layer(x)) - to_numpy(plain(x))).max() > 1e-2


def test_symbolic_call_and_model() -> None:
    inputs = keras.Input((None, H, d))
    outputs = RotaryEmbedding()(inputs)
    assert outputs.shape == (None, None, H, d)
    x = floats(B, N, H, d)
    model = keras.Model(inputs, outputs)
    np.testing.assert_allclose(model.predict_on_batch(x), to_numpy(RotaryEmbedding()(x)), atol=1e-6)


def test_layer_of_unknown_lengths() -> None:
    model = keras.Sequential(
        [
            keras.Input((None, D)),
            moh_attention(key_dim=4, rotary_embedding=RotaryEmbedding(50.0)),
        ]
    )
    (layer,) = model.layers
    for length in (T, 1, 9):
        x = floats(B, length, D)
        np.testing.assert_allclose(model.predict_on_batch(x), to_numpy(layer(x)), atol=1e-5)


def test_config() -> None:
    again = RotaryEmbedding.from_config(RotaryEmbedding(50, 4, name="mine").get_config())
    assert (again.max_wavelength, again.scaling_factor, again.name) == (50.0, 4.0, "mine")


@pytest.mark.usefixtures("always_worth_it")
def test_rows_are_turned_where_only_rows_are_projected() -> None:
    """All keys, but of the queries only those of the heads taken."""
    rotary = Recorded()
    layer = moh_attention(key_dim=4, rotary_embedding=rotary)
    x = floats(B, T, D)
    layer(x)
    shapes = [shape for shape, _, _ in rotary.calls]
    by_rows = (1, B * T * layer.num_active_heads, 1, 4)
    if keras.backend.backend() in implementations.ROWS:
        assert shapes == [(B, T, 6, 4), by_rows]
    else:
        assert shapes == [(B, T, 6, 4)] * 2


@pytest.mark.parametrize("value", [0, -1.0, True, "10", None, float("nan")])
@pytest.mark.parametrize("name", ["max_wavelength", "scaling_factor"])
def test_constructor_refuses(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}`.*Received: {name}="):
        RotaryEmbedding(**{name: value})


@pytest.mark.parametrize(
    ("shape", "positions", "message"),
    [
        ((B, N, H, 5), None, "even number of features.*5"),
        ((N, d), None, "batch, length"),
        ((B, N, H, d), (N + 1,), "`positions`"),
        ((B, N, H, d), (B + 1, N), "`positions`"),
        ((B, N, H, d), (), "`positions`"),
    ],
)
def test_call_refuses(shape: Any, positions: Any, message: str) -> None:
    positions = None if positions is None else np.zeros(positions, "int32")
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding()(floats(*shape), positions=positions)


def test_layer_refuses() -> None:
    several = moh_attention(key_dim=4, rotary_embedding=RotaryEmbedding())
    with pytest.raises(ValueError, match=r"`rotary_embedding` needs a single attention axis.*axes"):
        several.build((B, 3, T, D))
    odd = MoHAttention(6, 3, 2, 2, rotary_embedding=RotaryEmbedding())
    with pytest.raises(ValueError, match="even number of features"):
        odd.build((B, T, D))
