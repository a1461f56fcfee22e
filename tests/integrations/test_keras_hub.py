"""`convert_to_moh` on the models of keras-hub."""

import importlib
import inspect
import json
import subprocess
import sys
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops
from keras_hub.src.models.llama.llama_rotary_embedding import LlamaRotaryEmbedding

import keras_moh
from keras_moh.conversion.adapters import ADAPTERS as ADAPTER_OF
from keras_moh.conversion.remembering import walk
from tests.helpers import to_numpy
from tests.integrations.models import (
    BACKBONES,
    CAUSAL_LMS,
    LENGTH,
    LLAMA_31,
    PADDING,
    TOKENS,
    VOCABULARY,
    adapters,
    assert_equal_outputs,
    backbone,
    causal_lm,
    converted,
    inputs_of,
    outputs_of,
)
from tests.samples import B, D, T, floats, moh_attention

ADAPTERS = {
    "bert": "MoHMultiHeadAttention",
    "vit": "MoHMultiHeadAttention",
    "gpt2": "MoHCachedMultiHeadAttention",
    "opt": "MoHCachedMultiHeadAttention",
    "llama": "MoHLlamaAttention",
    "llama 3.1": "MoHLlamaAttention",
    "mistral": "MoHMistralAttention",
    "qwen3": "MoHQwen3Attention",
}


@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize(("shared", "top_k"), [(1.0, 0), (0.5, 0.5)])
def test_all_heads_active_change_nothing(name, shared, top_k):
    model = backbone(name)
    weights = model.get_weights()
    new_model, report = keras_moh.convert_to_moh(model, shared, top_k)
    assert not report.left
    if name in ADAPTERS:
        assert [type(layer).__name__ for layer in adapters(new_model)] == [ADAPTERS[name]] * 2
    assert isinstance(new_model, type(model))
    assert_equal_outputs(new_model, model)
    assert [type(layer) for _, layer in walk(model)] == [
        type(layer) for _, layer in walk(BACKBONES[name]())
    ]
    for weight, before in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(weight, before)


@pytest.mark.parametrize("source", ADAPTER_OF)
def test_adapters_are_called_as_their_sources(source):
    module, name = source.rsplit(".", 1)
    theirs, own = (
        list(inspect.signature(cls.call).parameters.values())
        for cls in (getattr(importlib.import_module(module), name), ADAPTER_OF[source])
    )
    assert [(x.name, x.default) for x in own[:-1]] == [(x.name, x.default) for x in theirs]
    assert own[-1].name == "return_routing"


@pytest.mark.parametrize("name", BACKBONES)
def test_models_come_back(name, tmp_path):
    model = converted(backbone(name))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again) is type(model)
    actual, expected = ([layer.get_config() for layer in adapters(m)] for m in (again, model))
    assert json.dumps(actual) == json.dumps(expected)
    assert_equal_outputs(again, model, 1e-6)


IN_A_NEW_PROCESS = """
import sys
import keras
import keras_moh
import numpy as np

for folder in sys.argv[1:]:
    model = keras.saving.load_model(folder + "/model.keras")
    arrays = np.load(folder + "/arrays.npz")
    inputs = {name: arrays[name] for name in ("token_ids", "padding_mask")}
    np.testing.assert_allclose(model.predict_on_batch(inputs), arrays["outputs"], atol=1e-4)
    model.compile(sampler="greedy")
    tokens = model.generate(inputs, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(tokens, arrays["tokens"])
"""


def test_files_in_a_new_process(tmp_path):
    """One that imports the package, not keras-hub, and nothing that was converted before."""
    folders = []
    for name in CAUSAL_LMS:
        model = converted(causal_lm(name))
        model.compile(sampler="greedy")
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        model.save(folder / "model.keras")
        inputs = {"token_ids": TOKENS, "padding_mask": PADDING}
        np.savez(
            folder / "arrays.npz",
            **inputs,
            outputs=model.predict_on_batch(inputs),
            tokens=np.asarray(model.generate(inputs, stop_token_ids=None)["token_ids"]),
        )
        folders.append(str(folder))
    command = [sys.executable, "-c", IN_A_NEW_PROCESS, *folders]
    subprocess.run(command, check=True, timeout=600)


def prompt(length: int) -> dict[str, Any]:
    mask = np.broadcast_to(np.arange(LENGTH) < length, TOKENS.shape)
    return {"token_ids": TOKENS * mask, "padding_mask": mask}


def greedy(model: keras.Model, length: int) -> np.ndarray:
    """Token by token, all of it anew each time."""
    tokens = prompt(length)["token_ids"]
    for i in range(length, LENGTH):
        inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
        logits = np.asarray(model.predict_on_batch(inputs))
        tokens[:, i] = logits[:, i - 1].argmax(-1)
    return tokens


@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_generate(name):
    model = causal_lm(name)
    for shared, top_k in ((1.0, 0), (0.5, 0.25)):
        new_model = converted(model, shared, top_k)
        assert isinstance(new_model, keras_hub.models.CausalLM)
        new_model.compile(sampler="greedy")
        generated = new_model.generate(prompt(4), stop_token_ids=None)["token_ids"]
        expected = greedy(model if top_k == 0 else new_model, 4)
        np.testing.assert_array_equal(to_numpy(generated), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_lora(name):
    model = converted(causal_lm(name))
    model.backbone.enable_lora(2)
    unconverted = causal_lm(name)
    unconverted.backbone.enable_lora(2)
    trained, expected = (
        [weight.path.split("/")[-3:] for weight in m.trainable_weights]
        for m in (model, unconverted)
    )
    assert trained == expected
    assert ["self_attention", "query", "lora_kernel_a"] in trained
    inputs = {"token_ids": TOKENS, "padding_mask": PADDING}
    model.compile(
        keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    losses = model.fit(inputs, np.roll(TOKENS, -1, 1), epochs=4, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["bert", "vit", "qwen3"])
def test_fit(name):
    model = converted(backbone(name))
    assert [layer.balance_loss_weight for layer in adapters(model)] == [0.005] * 2
    targets = keras.tree.map_structure(np.zeros_like, model.predict_on_batch(inputs_of(model)))
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    losses = model.fit(inputs_of(model), targets, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama 3.1"])
def test_quantize(name, tmp_path):
    model = converted(backbone(name), 1.0, 0)
    before = outputs_of(model)
    model.quantize("int8")
    assert all(layer.query_dense.quantization_mode == "int8" for layer in adapters(model))
    for x, y in zip(outputs_of(model), before, strict=True):
        assert 0 < np.abs(x - y).max() < 0.1 * np.abs(y).max()
    model.save(tmp_path / "model.keras")
    assert_equal_outputs(keras.saving.load_model(tmp_path / "model.keras"), model, 1e-5)


def test_tasks_keep_their_class():
    """Since their config holds the backbone's: keras-hub would find two classes for a backbone."""
    model = converted(causal_lm("llama 3.1"))
    assert type(model) is keras_hub.models.Llama3CausalLM
    assert type(model.backbone).__name__ == "MoHLlama3Backbone"
    assert isinstance(model.backbone, keras_hub.models.Llama3Backbone)


def test_a_backbone_alone_and_a_head_on_it(tmp_path):
    """The backbone of a converted task is converted in another model too, and when saved alone."""
    body = converted(causal_lm("llama")).backbone
    head = keras.layers.Dense(3)(body(body.input)[:, -1])
    model = keras.Model(body.input, head)
    features = keras.Model(body.input, body.get_layer("transformer_layer_0").output)
    body.save(tmp_path / "body.keras")
    model.save(tmp_path / "model.keras")
    for file, expected in (("body.keras", body), ("model.keras", model)):
        again = keras.saving.load_model(tmp_path / file)
        assert_equal_outputs(again, expected, 1e-6)
        assert len(adapters(again)) == 2
    # keras-hub 0.32 cannot save such a part at all: `LlamaTransformerDecoder` has no config.
    assert len(adapters(features)) == 1


def test_a_composed_model_of_layers(tmp_path):
    """Layers of keras-hub in a functional model of one's own."""
    inputs = keras.Input((LENGTH, 12))
    x = keras_hub.layers.TransformerEncoder(20, 4, name="encoder")(inputs)
    x = keras_hub.layers.TransformerDecoder(20, 4, name="decoder")(x, inputs)
    model = keras.Model(inputs, x)
    new_model, report = keras_moh.convert_to_moh(model, 0.5, 0.5)
    assert len(report.converted) == 3
    batch = np.random.default_rng(0).normal(size=(2, LENGTH, 12)).astype("float32")
    expected = model.predict_on_batch(batch)
    np.testing.assert_allclose(new_model.predict_on_batch(batch), expected, atol=1e-5)
    new_model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert len(adapters(again)) == 3
    np.testing.assert_allclose(again.predict_on_batch(batch), expected, atol=1e-5)


ROTARY: dict[str, tuple[keras.Layer, keras.Layer]] = {
    "plain": (
        keras_hub.layers.RotaryEmbedding(50.0, 4.0),
        keras_moh.RotaryEmbedding(50.0, 4.0),
    ),
    "llama 3.1": (
        LlamaRotaryEmbedding(**{name.removeprefix("rope_"): x for name, x in LLAMA_31.items()}),
        keras_moh.conversion.LlamaRotaryEmbedding(
            **{name.removeprefix("rope_"): x for name, x in LLAMA_31.items()}
        ),
    ),
}


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.usefixtures("always_worth_it")
def test_rotary_embeddings_of_keras_hub(kind):
    """In the layer: whole, by rows where only rows are projected, and from a cached position on."""
    theirs, own = (moh_attention(key_dim=8, rotary_embedding=layer) for layer in ROTARY[kind])
    x = ops.convert_to_tensor(floats(B, T, D))
    expected = to_numpy(own(x, use_causal_mask=True))
    np.testing.assert_allclose(to_numpy(theirs(x, use_causal_mask=True)), expected, atol=1e-5)
    cache = ops.zeros((B, 2, T, theirs.num_key_value_heads, theirs.key_dim))
    for start, stop in ((0, 2), (2, 3), (3, T)):
        for index in (start, ops.convert_to_tensor(start, "int32")):
            output, written = theirs(
                x[:, start:stop], use_causal_mask=True, cache=cache, cache_update_index=index
            )
            np.testing.assert_allclose(to_numpy(output), expected[:, start:stop], atol=1e-5)
        cache = written
    plain = moh_attention(key_dim=8)
    assert np.abs(to_numpy(plain(x, use_causal_mask=True)) - expected).max() > 1e-2


def test_gemma_is_left_with_the_reason():
    model = keras_hub.models.GemmaBackbone(
        vocabulary_size=11,
        num_layers=1,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=24,
        head_dim=4,
        attention_logit_soft_cap=50.0,
    )
    with pytest.raises(ValueError, match=r"nothing to convert .*CachedGemmaAttention.*soft cap"):
        keras_moh.convert_to_moh(model, 0.5, 0.25)


def test_dropout_of_outputs_is_refused():
    model = keras_hub.models.LlamaBackbone(
        vocabulary_size=11,
        num_layers=1,
        num_query_heads=4,
        num_key_value_heads=2,
        hidden_dim=16,
        intermediate_dim=24,
        dropout=0.1,
    )
    with pytest.raises(ValueError, match=r"dropout=0\.1, of the heads' outputs"):
        keras_moh.convert_to_moh(model, 0.5, 0.25)


def test_a_prefill_takes_a_fast_path(ran):
    """Through the dense causal masks that keras-hub makes, by the rule of `costs.py` as it is."""
    model = keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=1,
        num_query_heads=8,
        num_key_value_heads=4,
        hidden_dim=256,  # heads wide enough for the rule of every backend
        intermediate_dim=16,
    )
    new_model = converted(model, 0.25, 0.25)
    tokens = np.random.default_rng(0).integers(VOCABULARY, size=(1, 1024))
    new_model.predict_on_batch({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    assert {*ran} - {"reference"}
