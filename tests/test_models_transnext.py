"""The authors' MoH-ViT, which is TransNeXt: their numbers (see `goldens/README.md`) and files."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_moh.models import MoHTransNeXt, checkpoints
from keras_moh.models.cosine_attention import (
    AggregatedAttention,
    CosineAttention,
    average_pooling,
    relative_coordinates,
)
from keras_moh.models.moh_transnext import attention_places
from tests.checkpoints import write_safetensors
from tests.helpers import compiled, gradients, to_numpy

GOLDENS = Path(__file__).parent / "goldens"
LAYERS = sorted(GOLDENS.joinpath("vit_attention").glob("*.npz"))
MODELS = sorted(GOLDENS.joinpath("vit_model").glob("*.npz"))
TOLERANCE = 2e-5


class Golden:
    """One golden file."""

    def __init__(self, path: Path) -> None:
        self.arrays = dict(np.load(path))
        self.meta: dict[str, Any] = json.loads(str(self.arrays.pop("meta")))

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def under(self, prefix: str) -> dict[str, np.ndarray]:
        return {k.removeprefix(prefix): v for k, v in self.arrays.items() if k.startswith(prefix)}

    def layer(self) -> CosineAttention:
        meta = self.meta
        numbers = (meta["num_heads"], meta["shared_head"], meta["routed_head"])
        layer: CosineAttention
        if meta["module"] == "Attention":
            layer = CosineAttention(*numbers, use_bias=meta["qkv_bias"])
        else:
            layer = AggregatedAttention(
                *numbers, meta["window_size"], meta["sr_ratio"], use_bias=meta["qkv_bias"]
            )
        layer.build(self.grid("in/x").shape)
        checkpoints.fill(attention_places("", layer), self.under("param/"), "of this layer")
        return layer

    def grid(self, name: str) -> np.ndarray:
        array = self[name]
        return array.reshape(len(array), *self.meta["input_resolution"], -1)

    def model(self, **kwargs: Any) -> MoHTransNeXt:
        config = self.meta["config"]
        return MoHTransNeXt(
            config["img_size"],
            config["num_classes"],
            hidden_sizes=config["embed_dims"],
            depths=config["depths"],
            num_heads=config["num_heads"],
            num_shared_heads=config["shared_head"],
            top_k=config["routed_head"],
            mlp_ratios=config["mlp_ratios"],
            **kwargs,
        )


def assert_close(actual: Any, expected: np.ndarray, message: str = "") -> None:
    actual = to_numpy(actual).reshape(expected.shape)
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=message)


def dense_gates(routing: Any, num_heads: int) -> np.ndarray:
    heads, gates = to_numpy(routing.heads), to_numpy(routing.gates)
    dense = np.zeros((*heads.shape[:-1], num_heads), gates.dtype)
    np.put_along_axis(dense, heads, gates, axis=-1)
    return dense


@pytest.mark.parametrize("path", LAYERS, ids=lambda path: path.stem)
def test_layers(path):
    """Outputs, gates, loss and every gradient; one test, since JAX compiles one program for all."""
    golden = Golden(path)
    layer, cotangent = golden.layer(), ops.convert_to_tensor(golden.grid("in/cotangent"))
    routed = golden.meta["routed_head"] > 0

    def loss(x: Any) -> Any:
        output = layer(x, training=True)
        routing = layer.router(x)
        further = [output, *routing[:2], *layer.losses]
        return ops.sum(output * cotangent) + sum(layer.losses), further

    result = gradients(loss, [golden.grid("in/x")], layer)
    output, heads, gates, *losses = result.further
    assert_close(output, golden["f64/out_train"])
    routing = type("Routing", (), {"heads": heads, "gates": gates})
    assert_close(dense_gates(routing, golden.meta["num_heads"]), golden["f64/gates"])
    assert len(losses) == routed
    if routed:
        np.testing.assert_allclose(losses[0], 0.01 * golden["f64/aux"], rtol=2e-5)

    expected = golden.under("f64/grad/param/")
    parts = {
        variable.path: (place.name, values)
        for place in attention_places("", layer)
        for variable, values in place.values(expected[place.name])
    }
    assert set(parts) == {f"{layer.name}/{name}" for name in result.weights}
    for name, actual in result.weights.items():
        theirs, values = parts[f"{layer.name}/{name}"]
        size = max(np.abs(expected[theirs]).max(), 0.1)
        values = values.reshape(actual.shape)
        np.testing.assert_allclose(actual, values, rtol=0, atol=2e-4 * size, err_msg=theirs)
    by_x = golden["f64/grad/x"]
    np.testing.assert_allclose(
        result.inputs[0].reshape(by_x.shape), by_x, rtol=0, atol=2e-4 * np.abs(by_x).max()
    )


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_models(path, tmp_path):
    golden = Golden(path)
    model = golden.model()
    file = write_safetensors(tmp_path / "it.safetensors", golden.under("param/"))
    model.load_official(file)
    blocks = golden.meta["block_order"]
    layers = [
        model.get_layer(block.replace("block", "block_").replace(".", "_") + "_attention")
        for block in blocks
    ]
    stages = [model.get_layer(f"norm_{stage}").output for stage in (2, 3, 4)]
    inner = keras.Model(model.input, [*stages, *(layer.input for layer in layers)])
    images = np.moveaxis(golden["in/x"], 1, -1)

    def call(images: Any) -> Any:
        logits = model(images, training=True)  # without dropout the same as in evaluation
        losses = sum(model.losses)
        stages_and_inputs = inner(images)
        routings = [layer.router(x) for layer, x in zip(layers, stages_and_inputs[3:], strict=True)]
        return logits, losses, stages_and_inputs[:3], [routing[:2] for routing in routings]

    logits, loss, outputs, routings = compiled(call, images)
    assert_close(logits, golden["f64/logits"])
    np.testing.assert_allclose(to_numpy(loss), golden["f64/moh_loss"], rtol=2e-5)
    for stage, output in zip((2, 3, 4), outputs, strict=True):
        assert_close(output, golden[f"f64/stage{stage}"], f"stage {stage}")
    for i, (heads, gates) in enumerate(routings):
        routing = type("Routing", (), {"heads": heads, "gates": gates})
        expected = golden[f"f64/gates{i}"]
        assert_close(dense_gates(routing, expected.shape[-1]), expected, f"gates of {blocks[i]}")
    routed = [layer for layer in layers if layer.router.top_k]
    assert len(routed) == len(golden.meta["routed_blocks"])
    assert {layer.balance_loss_weight for layer in layers} == {0.01 / len(routed)}


GOLDEN = Golden(MODELS[0])


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="writes a file of PyTorch's; reading it is the same code on every backend",
)
def test_files_of_pytorch(tmp_path):
    import argparse

    import torch

    weights = {name: torch.from_numpy(array) for name, array in GOLDEN.under("param/").items()}
    content = {"model": weights, "epoch": 299, "args": argparse.Namespace(drop_path=0.45)}
    torch.save(content, tmp_path / "it.pth")
    model, expected = GOLDEN.model(), GOLDEN.model()
    model.load_official(tmp_path / "it.pth")
    checkpoints.fill(expected._places(), GOLDEN.under("param/"), "")
    for actual, weight in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(to_numpy(actual), to_numpy(weight))


def test_every_wrong_weight_is_listed_and_nothing_changed(tmp_path):
    weights = GOLDEN.under("param/")
    del weights["block3.0.attn.wg.weight"]
    weights["head_dist.weight"] = np.ones((7, 32), "float32")
    weights["block4.0.attn.qkv.bias"] = np.ones(95, "float32")
    model = GOLDEN.model()
    before = [to_numpy(weight) for weight in model.weights]
    with pytest.raises(ValueError, match="not those of this MoHTransNeXt") as error:
        model.load_official(write_safetensors(tmp_path / "it.safetensors", weights))
    assert str(error.value).splitlines()[1:] == [
        "  missing: block3.0.attn.wg.weight",
        "  unexpected: head_dist.weight",
        "  of the wrong shape: block4.0.attn.qkv.bias is (95,), not (96,)",
    ]
    for weight, expected in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(to_numpy(weight), expected)


@pytest.mark.parametrize(("length", "pooled"), [(8, 2), (7, 3), (6, 4), (5, 5), (9, 1)])
def test_average_pooling(length, pooled):
    """Cell by cell, as PyTorch's documentation of adaptive pooling has it."""
    x = np.random.default_rng(0).standard_normal(length)
    expected = [
        np.mean(x[int(np.floor(i * length / pooled)) : int(np.ceil((i + 1) * length / pooled))])
        for i in range(pooled)
    ]
    np.testing.assert_allclose(average_pooling(length, pooled) @ x, expected)


def test_relative_coordinates():
    table, which = relative_coordinates((3, 4), (1, 2), (5, 7))
    assert which.shape == (12, 2)
    # The token in row 2, column 1, and the pooled cell of columns 2 and 3.
    down, right = (2 - 1) / 4 * 8, (1 - 2.5) / 6 * 8
    expected = [np.log2(down + 1) / 3, -np.log2(-right + 1) / 3]
    np.testing.assert_allclose(table[which[9, 1]], expected, rtol=1e-6)
    assert len(np.unique(table, axis=0)) == len(table)


def test_vectors_of_length_0_have_gradients():
    layer = CosineAttention(2, 1, 1)
    layer.build((1, 2, 2, 4))
    result = gradients(lambda x: ops.sum(layer(x)), [np.zeros((1, 2, 2, 4), "float32")], layer)
    for gradient in (*result.inputs, *result.weights.values()):
        assert np.isfinite(gradient).all()


TINY: dict[str, Any] = {
    "image_size": 64,
    "num_classes": 3,
    "hidden_sizes": [4, 4, 8, 8],
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 4, 4],
    "num_shared_heads": [2, 2, 2, 1],
    "top_k": [0, 0, 1, 2],
    "mlp_ratios": (1, 1, 1, 1),
}


def test_fit_and_save(tmp_path):
    keras.utils.set_random_seed(0)
    model = MoHTransNeXt(**TINY, drop_path_rate=0.1)
    labels = np.arange(12) % 3
    images = np.random.default_rng(0).standard_normal((3, 64, 64, 3))[labels].astype("float32")
    model.compile(
        keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    losses = model.fit(images, labels, batch_size=6, epochs=12, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.get_config() == model.get_config()
    np.testing.assert_allclose(
        again.predict(images, verbose=0), model.predict(images, verbose=0), atol=1e-6
    )


def test_32_pixels_of_a_model_of_more():
    """A single token in the last grid is finite where the unit of distances is another's."""
    model = MoHTransNeXt(**TINY | {"image_size": 32}, pretrain_size=224, dtype="mixed_bfloat16")
    logits = model(np.ones((1, 32, 32, 3), "float32"))
    assert keras.backend.standardize_dtype(logits.dtype) == "bfloat16"
    assert np.isfinite(to_numpy(logits)).all()
    assert {weight.dtype for weight in model.trainable_weights} == {"float32"}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"image_size": 72}, "image_size.*multiple of 32.*72"),
        ({"image_size": 32}, "image_size.*at least 64.*single token.*32"),
        ({"pretrain_size": 32}, "pretrain_size.*at least 64.*32"),
        ({"pretrain_size": 100}, "pretrain_size.*multiple of 32.*100"),
        ({"depths": [1, 1, 1]}, r"depths.*list of 4 integers.*\[1, 1, 1\]"),
        ({"num_heads": [3, 2, 4, 4], "num_shared_heads": [3, 2, 2, 1]}, "multiple of num_heads=3"),
        ({"top_k": [0, 0, 3, 2]}, "top_k=3 with 2 routed heads"),
        ({"window_size": 4}, "window_size.*odd.*4"),
        ({"pool_ratios": [32, 4, 2]}, "pool_ratio.*at most.*16.*32"),
        ({"mlp_ratios": (1, 1)}, "mlp_ratios.*list of 4 numbers"),
    ],
)
def test_arguments_out_of_range_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        MoHTransNeXt(**TINY | changes)


@pytest.mark.parametrize(
    ("name", "percent"),
    [("small-75", 75.29), ("small-80", 79.95), ("base-75", 75.0), ("base-50", 50.0)],
)
def test_names(name, percent, monkeypatch):
    """The shares are those that the authors' code reports of its own configurations."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(MoHTransNeXt, "__init__", lambda self, *args, **kwargs: made.update(kwargs))
    MoHTransNeXt.from_name(name)
    active = np.array(made["num_shared_heads"]) + made["top_k"]
    heads, depths = np.array(made["num_heads"]), np.array(made["depths"])
    assert round(100 * (active @ depths) / (heads @ depths), 2) == percent
    np.testing.assert_array_equal(heads * 24, made["hidden_sizes"])


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"name.*'small-75'.*base-60"):
        MoHTransNeXt.from_name("base-60")
