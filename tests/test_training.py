"""The layer trains as Keras's do: compiled or not, rematerialized, regularized, with adapters."""

import functools

import keras
import numpy as np
import pytest
from helpers import compiled, gradients, to_numpy, weights_by_name
from keras import ops
from samples import B, D, T, floats, moh_attention

from keras_moh import MoHAttention

BACKEND = keras.backend.backend()
PROJECTIONS = ("query", "key", "value", "attention_output")
ROUTER = ("routed_scores", "shared_scores", "group_scores")


@pytest.fixture
def no_c_compiler_needed(monkeypatch):
    """On PyTorch, compile all but the last step: that one needs a C++ compiler."""
    if BACKEND == "torch":
        import torch

        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def model_of(layer, shape=(T, D)):
    readout = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.1))
    return keras.Sequential([keras.Input(shape), layer, readout])


def regression(seed=0):
    """64 sequences, and for every token a number that depends on the others."""
    x = floats(64, T, D, seed=seed)
    return x, np.tanh(x[..., :1] + x.mean(axis=1, keepdims=True)[..., 1:2])


MODES = {
    "jit": {"jit_compile": True},
    "no jit": {"jit_compile": False},
    "eager": {"run_eagerly": True},
}


@pytest.mark.usefixtures("no_c_compiler_needed")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_fit_evaluate_predict(mode):
    """The loss falls, by the same steps in every mode, and all three agree on what it is."""
    x, y = (array[:8] for array in regression())
    layer = moh_attention(z_loss_weight=0.001)
    model = model_of(layer)
    model.compile(keras.optimizers.SGD(0.001), "mse", **mode)
    losses = model.fit(x, y, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]
    expected = to_numpy(model(x))
    predicted = model.predict(x, verbose=0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        model.evaluate(x, y, verbose=0), np.square(expected - y).mean(), rtol=1e-4
    )

    again = model_of(moh_attention(z_loss_weight=0.001))
    again.compile(keras.optimizers.SGD(0.001), "mse")
    np.testing.assert_allclose(again.train_on_batch(x, y), losses[0], rtol=1e-5)
    again.train_on_batch(x, y)
    for weight, other in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-4, atol=1e-5)


def test_learns_to_fit():
    """Better by far than any constant."""
    x, y = regression()
    model = model_of(moh_attention())
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(x, y, epochs=40, verbose=0)
    assert model.evaluate(x, y, verbose=0) < 0.4 * y.var()


@pytest.mark.skipif(BACKEND != "torch", reason="torch.compile")
@pytest.mark.parametrize("training", [False, True])
def test_torch_compile(training):
    """In one graph, losses and gradients included."""
    import torch

    x = ops.convert_to_tensor(floats(B, T, D))
    layer = moh_attention(num_key_value_heads=2, qk_norm=True, sliding_window=3)
    expected = layer(x, use_causal_mask=True, training=training)

    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def function(x):
        return layer(x, use_causal_mask=True, training=training)

    x = x.clone().requires_grad_()
    output = function(x)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)
    (by,) = torch.autograd.grad(output.square().sum(), [x])
    expected_output = layer(x, use_causal_mask=True, training=training)
    (expected_by,) = torch.autograd.grad(expected_output.square().sum(), [x])
    torch.testing.assert_close(by, expected_by, rtol=0, atol=1e-4)
    if training:
        assert len(layer.losses) == 1


# Rematerialization --------------------------------------------------------------------------------

SCOPES = {
    "full": {"mode": "full"},
    "larger than 1": {"mode": "larger_than", "output_size_threshold": 1},
    "larger than all": {"mode": "larger_than", "output_size_threshold": 10**9},
    "listed": {"mode": "list_of_layers", "layer_names": ["attention"]},
    "not listed": {"mode": "list_of_layers", "layer_names": ["query", "router", "other"]},
    "activations": {"mode": "activations"},
}
REMATERIALIZED = {"full", "larger than 1", "listed"}


def scoped_layer(scope, **arguments):
    """A layer created in the scope and built in it, too, so that its parts are."""
    arguments = {"name": "attention", "z_loss_weight": 0.1, **arguments}
    if scope is None:
        layer = moh_attention(**arguments)
        layer.build((None, T, D))
        return layer
    with keras.RematScope(**SCOPES[scope]):
        layer = moh_attention(**arguments)
        layer.build((None, T, D))
    return layer


def gradients_of(layer, **call):
    def total(x):
        output = layer(x, training=True, **call)
        return ops.sum(ops.square(output)) + 10 * sum(layer.losses)

    return gradients(total, [floats(B, T, D)], layer)


@functools.cache
def expected_gradients(dropout):
    return gradients_of(scoped_layer(None, dropout=dropout, seed=3), use_causal_mask=True)


@pytest.mark.parametrize(("scope", "dropout"), [("full", 0.0), *((scope, 0.5) for scope in SCOPES)])
def test_same_gradients_when_rematerialized(scope, dropout):
    found = gradients_of(scoped_layer(scope, dropout=dropout, seed=3), use_causal_mask=True)
    expected = expected_gradients(dropout)
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-5)
    np.testing.assert_allclose(found.inputs[0], expected.inputs[0], rtol=1e-4, atol=1e-4)
    assert set(found.weights) == set(expected.weights)
    for name, gradient in found.weights.items():
        np.testing.assert_allclose(
            gradient, expected.weights[name], rtol=1e-4, atol=1e-4, err_msg=name
        )


@pytest.mark.parametrize("scope", SCOPES)
def test_is_really_rematerialized(scope, monkeypatch):
    """The attention is computed again for the gradient: its code runs, or is traced, twice."""
    import keras_moh.moh_attention as module

    calls = []

    def counted(*args, **kwargs):
        calls.append(None)
        return attention(*args, **kwargs)

    attention = module.attention_spec
    monkeypatch.setattr(module, "attention_spec", counted)
    layer = scoped_layer(scope)
    if BACKEND == "jax":  # traces once, and marks what is to be computed again
        import jax

        def total(x):
            with keras.StatelessScope():
                return ops.sum(layer(x, training=True))

        program = str(jax.make_jaxpr(jax.grad(total))(floats(B, T, D)))
        assert ("remat" in program or "checkpoint" in program) == (scope in REMATERIALIZED)
        return
    gradients_of(layer)
    assert len(calls) == (2 if scope in REMATERIALIZED else 1)


def test_losses_counted_once_when_rematerialized():
    """In `fit`, in a layer called twice."""
    x = floats(B, T, D)
    logs = []
    for each in ("full", None):
        layer = scoped_layer(each, balance_loss_weight=0.2)
        inputs = keras.Input((T, D))
        outputs = keras.layers.add([layer(inputs), layer(keras.layers.Rescaling(2.0)(inputs))])
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.0), "mse", loss_weights=0.01, metrics=["mse"])
        history = model.fit(x, 0 * x, verbose=0).history
        logs.append(history["loss"][0] - 0.01 * history["mse"][0])
    np.testing.assert_allclose(logs[0], logs[1], atol=1e-6)
    assert logs[0] > 0.1


def test_built_outside_of_its_scope():
    """As in a functional model that is built later."""
    with keras.RematScope(mode="full"):
        layer = moh_attention(name="attention", z_loss_weight=0.1)
    layer.build((None, T, D))
    found, expected = gradients_of(layer), gradients_of(scoped_layer(None))
    np.testing.assert_allclose(found.inputs[0], expected.inputs[0], rtol=1e-4, atol=1e-4)


def test_activity_regularizer_is_refused_when_rematerialized():
    layer = scoped_layer("full", activity_regularizer="l2")
    with pytest.raises(ValueError, match=r"`activity_regularizer` must be None .* rematerialized"):
        layer(floats(B, T, D), training=True)


def test_keras_attention_does_not_rematerialize_on_tensorflow():
    """When this fails, Keras has mended its own: then see whether this package may be simpler."""
    with keras.RematScope(mode="full"):
        layer = keras.layers.MultiHeadAttention(2, 3)
    inputs = keras.Input((T, D))
    model = keras.Model(inputs, layer(inputs, inputs))
    model.compile("sgd", "mse")
    x = floats(B, T, D)
    if BACKEND == "tensorflow":
        with pytest.raises(ValueError, match=r"custom_gradient decorator .* keywords arguments"):
            model.train_on_batch(x, 0 * x)
    else:
        assert np.isfinite(model.train_on_batch(x, 0 * x))


# Dropout ------------------------------------------------------------------------------------------


def test_dropout_is_seeded():
    x = floats(B, T, D)
    layer, same, other = (moh_attention(dropout=0.5, seed=seed) for seed in (3, 3, 4))
    first, second = (to_numpy(layer(x, training=True)) for _ in range(2))
    np.testing.assert_array_equal(to_numpy(same(x, training=True)), first)
    np.testing.assert_array_equal(to_numpy(same(x, training=True)), second)
    assert np.abs(first - second).max() > 0.1
    assert np.abs(to_numpy(other(x, training=True)) - first).max() > 0.1


def test_no_dropout_at_inference():
    x = floats(B, T, D)
    layer, without = moh_attention(dropout=0.5, seed=3), moh_attention()
    expected = to_numpy(without(x))
    for arguments in ({}, {"training": False}, {"training": None}):
        np.testing.assert_array_equal(to_numpy(layer(x, **arguments)), expected)
    assert moh_attention().seed_generator is None


def test_dropout_differs_between_steps_of_fit():
    """With nothing learnt, losses differ by the dropout alone; evaluation has none."""
    x = floats(B, T, D)
    model = keras.Sequential([keras.Input((T, D)), moh_attention(dropout=0.5, seed=3)])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    losses = model.fit(x, 0 * x, epochs=3, verbose=0).history["loss"]
    assert len(set(losses)) == 3
    assert model.evaluate(x, 0 * x, verbose=0) == model.evaluate(x, 0 * x, verbose=0)


def test_dropout_preserves_the_expectation():
    """The mean of many draws is the output without dropout; every sequence is the same one."""
    x = np.broadcast_to(floats(1, T, D), (500, T, D))
    layer = moh_attention(dropout=0.3, seed=3)
    layer.build(x.shape)
    draws = to_numpy(layer(x, training=True))
    expected = to_numpy(layer(x[:1]))
    error = np.abs(draws.mean(0) - expected[0]) / (draws.std(0) / np.sqrt(len(x)))
    assert error.max() < 5  # standard errors, of 55 numbers
    assert draws.std(0).min() > 0.01


def test_scores_returned_are_those_before_dropout():
    x = floats(B, T, D)
    _, dropped = moh_attention(dropout=0.5)(x, training=True, return_attention_scores=True)
    _, scores = moh_attention()(x, return_attention_scores=True)
    np.testing.assert_array_equal(to_numpy(dropped), to_numpy(scores))


# Regularizers, constraints, initializers ----------------------------------------------------------


def test_regularizers_and_constraints_reach_every_weight():
    layer = moh_attention(
        kernel_regularizer=keras.regularizers.L2(0.1),
        bias_regularizer=keras.regularizers.L1(0.2),
        kernel_constraint=keras.constraints.MaxNorm(0.1),
        bias_constraint=keras.constraints.NonNeg(),
        balance_loss_weight=0.0,
    )
    layer.build((B, T, D))
    weights = weights_by_name(layer)
    kernels = [f"{name}/kernel" for name in PROJECTIONS]
    kernels += [f"router/{name}/kernel" for name in ROUTER]
    biases = [f"{name}/bias" for name in PROJECTIONS]
    assert set(weights) == {*kernels, *biases}
    for name in kernels:
        assert isinstance(weights[name].regularizer, keras.regularizers.L2)
        assert isinstance(weights[name].constraint, keras.constraints.MaxNorm)
    for name in biases:
        assert isinstance(weights[name].regularizer, keras.regularizers.L1)
        assert isinstance(weights[name].constraint, keras.constraints.NonNeg)
    values = {name: to_numpy(weight) for name, weight in weights.items()}
    expected = 0.1 * sum(np.square(values[name]).sum() for name in kernels)
    expected += 0.2 * sum(np.abs(values[name]).sum() for name in biases)
    assert len(layer.losses) == len(weights)
    np.testing.assert_allclose(sum(map(to_numpy, layer.losses)), expected, rtol=1e-5)

    model = model_of(layer)
    model.compile("sgd", "mse")
    model.train_on_batch(*regression())
    for name in biases:
        assert (to_numpy(weights[name]) >= 0).all()
    for name in kernels:
        assert np.linalg.norm(to_numpy(weights[name]), axis=0).max() < 0.1 + 1e-6


def test_every_kernel_is_initialized_differently():
    """Also by an initializer that is one object with a seed."""
    for initializer in ("glorot_uniform", keras.initializers.TruncatedNormal(stddev=0.02)):
        layer = MoHAttention(6, 3, 2, 2, kernel_initializer=initializer)
        layer.build((B, T, D))
        kernels = [to_numpy(weight) for weight in layer.weights if weight.path.endswith("kernel")]
        first = [kernel.ravel()[:20] for kernel in kernels]
        assert len(first) == 7
        for index, kernel in enumerate(first):
            assert all(np.abs(kernel - other).max() > 1e-3 for other in first[:index])
            assert np.abs(kernel).max() > 1e-3


def test_activity_regularizer_sees_the_outputs_of_the_projections():
    x = floats(B, T, D)
    layer = moh_attention(activity_regularizer=keras.regularizers.L2(0.1), balance_loss_weight=0)
    output = layer(x)
    assert len(layer.losses) == 4
    projected = [getattr(layer, f"{name}_dense")(x) for name in ("query", "key", "value")]
    expected = sum(0.1 * np.square(to_numpy(y)).sum() / B for y in (*projected, output))
    layer(x)
    np.testing.assert_allclose(sum(map(to_numpy, layer.losses)), expected, rtol=1e-5)


# Which weights learn ------------------------------------------------------------------------------


@pytest.mark.parametrize("use_bias", [False, True])
def test_every_weight_learns(use_bias):
    """In one step of `fit` each one changes. (Without `qk_norm`, a key bias changes no softmax.)"""
    layer = moh_attention(use_bias=use_bias, qk_norm="rms", num_key_value_heads=2)
    model = model_of(layer)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    before = {name: to_numpy(weight) for name, weight in weights_by_name(layer).items()}
    model.fit(*regression(), batch_size=64, verbose=0)
    unchanged = {
        name
        for name, weight in weights_by_name(layer).items()
        if np.array_equal(to_numpy(weight), before[name])
    }
    assert len(before) == 4 + 4 * use_bias + 2 + 3
    assert unchanged == set()


def test_not_trainable():
    layer = moh_attention(z_loss_weight=0.1)
    model = model_of(layer)
    layer.trainable = False
    assert layer.trainable_variables == []
    model.compile("sgd", "mse")
    before = layer.get_weights()
    model.fit(*regression(), verbose=0)
    for weight, value in zip(layer.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, value)


def test_router_frozen_alone():
    layer = moh_attention(qk_norm="rms")
    model = model_of(layer)
    layer.router.trainable = False
    model.compile("sgd", "mse")
    before = {name: to_numpy(weight) for name, weight in weights_by_name(layer).items()}
    model.fit(*regression(), verbose=0)
    for name, weight in weights_by_name(layer).items():
        assert np.array_equal(to_numpy(weight), before[name]) == name.startswith("router/")


# LoRA and quantization ----------------------------------------------------------------------------


def test_lora(tmp_path):
    """Adapters of the projections learn, are merged into the kernels that are used, and saved."""
    layer = moh_attention()
    model = model_of(layer)
    projections = (layer.query_dense, layer.key_dense, layer.value_dense, layer.output_dense)
    kernels = [to_numpy(projection.kernel) for projection in projections]
    x, y = regression()
    before = model.predict(x, verbose=0)
    for projection in projections:
        projection.enable_lora(2)
    np.testing.assert_allclose(model.predict(x, verbose=0), before, atol=1e-5)
    names = {weight.path.rsplit("/", 1)[-1] for weight in layer.trainable_variables}
    assert names == {"kernel", "bias", "lora_kernel_a", "lora_kernel_b"}
    assert len(layer.trainable_variables) == 3 + 4 + 8
    model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
    for projection, kernel in zip(projections, kernels, strict=True):
        np.testing.assert_array_equal(to_numpy(projection._kernel), kernel)
        assert np.abs(to_numpy(projection.kernel) - kernel).max() > 0

    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again.predict(x, verbose=0), expected, atol=1e-5)
    model.save_weights(tmp_path / "model.weights.h5")
    plain = model_of(moh_attention())
    plain.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(plain.predict(x, verbose=0), expected, atol=1e-5)


def quantize_model(model, layer):
    with pytest.warns(UserWarning, match="quantize") as warned:
        model.quantize("int8")
    messages = {str(warning.message) for warning in warned if warning.category is UserWarning}
    for name in ROUTER:
        assert any(f"'{name}' of a router is not quantized" in message for message in messages)


@pytest.mark.parametrize(
    "quantize",
    [quantize_model, lambda model, layer: layer.quantize("int8")],
    ids=["model", "layer"],
)
def test_quantize(quantize, tmp_path):
    layer = moh_attention(qk_norm=True)
    model = model_of(layer)
    x = floats(B, T, D)
    before = to_numpy(model(x))
    heads = to_numpy(layer.router(x).heads)
    quantize(model, layer)
    dtypes = {name: weight.dtype for name, weight in weights_by_name(layer).items()}
    assert {dtypes[f"{name}/kernel"] for name in PROJECTIONS} == {"int8"}
    assert {dtypes[f"router/{name}/kernel"] for name in ROUTER} == {"float32"}
    np.testing.assert_array_equal(to_numpy(layer.router(x).heads), heads)
    expected = to_numpy(model(x))
    error = np.abs(expected - before).max() / np.abs(before).max()
    assert 0 < error < 0.1

    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(to_numpy(again(x)), expected)
    assert {w.dtype for w in again.layers[0].query_dense.weights} == {"int8", "float32"}


def test_router_refuses_to_be_quantized():
    layer = moh_attention()
    layer.build((B, T, D))
    with pytest.raises(NotImplementedError, match="'routed_scores' of a router is not quantized"):
        layer.router.routed_scores.quantize("int8")


def test_compiled_call_is_the_eager_one():
    x = ops.convert_to_tensor(floats(B, T, D))
    layer = moh_attention()
    layer.build(x.shape)
    np.testing.assert_allclose(to_numpy(compiled(layer, x)), to_numpy(layer(x)), atol=1e-5)
