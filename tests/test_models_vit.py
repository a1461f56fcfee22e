"""`MoHViT`: against a vision transformer of NumPy, trained, saved."""

from typing import Any

import keras
import numpy as np
import pytest

import keras_moh
from keras_moh.models import MoHViT
from tests.helpers import to_numpy, weights_by_name

ARGUMENTS: dict[str, Any] = {
    "image_size": 12,
    "patch_size": 4,
    "num_classes": 7,
    "hidden_size": 20,
    "depth": 2,
    "num_heads": 5,
    "num_shared_heads": [2, 5],
    "top_k": [1, 0],
    "mlp_ratio": 3.0,
    "num_channels": 2,
}


def with_noise(model: keras.Model) -> keras.Model:
    generator = np.random.default_rng(0)
    for weight in model.weights:
        if "seed" not in weight.path:
            weight.assign(weight + 0.3 * generator.standard_normal(weight.shape))
    return model


def layer_norm(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gamma + beta


def expected_logits(model: MoHViT, images: np.ndarray) -> np.ndarray:
    """The model around its attention layers, which other tests are of."""
    from math import erf

    weights = {
        name: to_numpy(weight).astype("float64") for name, weight in weights_by_name(model).items()
    }

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return layer_norm(x, weights[f"{name}/gamma"], weights[f"{name}/beta"])

    def dense(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}/kernel"] + weights[f"{name}/bias"]

    tokens = [
        image[row : row + 4, column : column + 4].ravel()
        for image in images.astype("float64")
        for row in range(0, 12, 4)
        for column in range(0, 12, 4)
    ]
    x = dense(np.array(tokens).reshape(len(images), 9, -1), "patch_embedding")
    token = np.broadcast_to(weights["class_token/token"], (len(images), 1, 20))
    x = np.concatenate([token, x], axis=1) + weights["position_embedding/embeddings"]
    for i in range(2):
        attention = model.get_layer(f"block_{i}_attention")
        normed = norm(x, f"block_{i}_norm_1").astype("float32")
        x = x + to_numpy(attention(normed)).astype("float64")
        hidden = dense(norm(x, f"block_{i}_norm_2"), f"block_{i}_mlp_1")
        hidden = hidden * 0.5 * (1 + np.vectorize(erf)(hidden / np.sqrt(2)))
        x = x + dense(hidden, f"block_{i}_mlp_2")
    return dense(norm(x, "norm")[:, 0], "head")


IMAGES = np.random.default_rng(1).standard_normal((3, 12, 12, 2)).astype("float32")


def test_logits():
    model = with_noise(MoHViT(**ARGUMENTS))
    logits = to_numpy(model.predict_on_batch(IMAGES))
    np.testing.assert_allclose(logits, expected_logits(model, IMAGES), rtol=2e-5, atol=2e-5)


def test_heads_and_losses():
    model = MoHViT(**ARGUMENTS | {"num_shared_heads": 1, "top_k": [2, 4]})
    layers = [layer for layer in model.layers if isinstance(layer, keras_moh.MoHAttention)]
    assert [layer.num_active_heads for layer in layers] == [3, 5]
    # Two routed layers share the weight of the losses.
    assert [layer.balance_loss_weight for layer in layers] == [0.005, 0.005]
    model = MoHViT(**ARGUMENTS)
    model(IMAGES, training=True)
    # One is not routed. Balanced, a loss would be its weight.
    assert len(model.losses) == 1
    assert 0.0095 < float(to_numpy(model.losses[0])) < 0.03
    model(IMAGES)
    assert model.losses == []


def test_fit_and_save(tmp_path):
    keras.utils.set_random_seed(0)
    model = MoHViT(**ARGUMENTS | {"drop_path_rate": 0.1})
    labels = np.arange(56) % 7
    generator = np.random.default_rng(2)
    images = generator.standard_normal((7, 12, 12, 2))[labels]
    images = (images + 0.1 * generator.standard_normal(images.shape)).astype("float32")
    model.compile(
        keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    losses = model.fit(images, labels, batch_size=14, epochs=12, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.get_config() == model.get_config()
    np.testing.assert_allclose(
        again.predict(images, verbose=0), model.predict(images, verbose=0), atol=1e-6
    )


def test_a_model_of_its_layers_is_cloned_and_saved(tmp_path):
    """Keras makes these anew layer by layer, and not as `MoHViT`: each must know its arguments."""
    model = MoHViT(**ARGUMENTS, dtype="mixed_bfloat16")
    clone = keras.models.clone_model(
        model, clone_function=lambda x: type(x).from_config(x.get_config())
    )
    clone.set_weights(model.get_weights())
    part = keras.Model(model.input, model.get_layer("norm").output)
    part.save(tmp_path / "part.keras")
    again = keras.saving.load_model(tmp_path / "part.keras")
    for a, b in (model, clone), (part, again):
        assert [x.dtype_policy.name for x in a.layers] == [x.dtype_policy.name for x in b.layers]
        np.testing.assert_array_equal(*(to_numpy(x(IMAGES)) for x in (a, b)))


def test_dropped_paths():
    """The rates rise from 0, and a dropped branch is dropped for a whole image."""
    model = MoHViT(
        **ARGUMENTS | {"depth": 3, "num_shared_heads": 1, "top_k": 1}, drop_path_rate=0.6
    )
    names = [layer.name for layer in model.layers if "drop_path" in layer.name]
    assert names == [f"block_{i}_drop_path_{j}" for i in (1, 2) for j in (1, 2)]
    layer = model.get_layer("block_2_drop_path_1")
    assert layer.rate == 0.6
    dropped = to_numpy(layer(np.ones((50, 10, 20), "float32"), training=True))
    assert set(np.round(dropped.mean(axis=(1, 2)), 4)) == {0.0, 2.5}


def test_mixed_precision():
    model = MoHViT(**ARGUMENTS, dtype="mixed_bfloat16")
    assert {weight.dtype for weight in model.weights} == {"float32"}
    logits = model(IMAGES)
    assert keras.backend.standardize_dtype(logits.dtype) == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"image_size": 13}, "image_size.*multiple of patch_size=4.*13"),
        ({"hidden_size": 21}, "hidden_size.*multiple of num_heads=5.*21"),
        ({"top_k": [1, 2, 3]}, r"top_k.*list of 2 integers.*\[1, 2, 3\]"),
        ({"top_k": [1, 1]}, "top_k=1 with 0 routed heads"),
        ({"drop_path_rate": 1}, "drop_path_rate.*1"),
        ({"depth": 0}, "depth.*positive integer.*0"),
    ],
)
def test_arguments_out_of_range_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        MoHViT(**ARGUMENTS | changes)
