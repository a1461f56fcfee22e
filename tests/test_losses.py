"""The balancing loss and the z-loss: their values in Keras's bookkeeping, once for every call.

What they should be is computed here from the router's kernel, in float64 NumPy.
"""

import keras
import numpy as np
import pytest
from helpers import compiled, gradients, to_numpy
from keras import ops
from samples import B, D, T, floats, moh_attention, padding

import keras_moh

BALANCE, Z = 0.2, 0.1
WEIGHTS = {"balance_loss_weight": BALANCE, "z_loss_weight": Z}


def balancing_and_z_loss(layer, x, mask=None):
    """The two losses of a call of `layer` on `x (..., D)`, unweighted."""
    kernel = to_numpy(layer.router.routed_scores.kernel).astype("float64")
    tokens = np.asarray(x, "float64").reshape(-1, x.shape[-1])
    if mask is not None:
        tokens = tokens[np.asarray(mask).ravel()]
    if not len(tokens):
        return 0.0, 0.0
    exponentials = np.exp(tokens @ kernel)
    partition = exponentials.sum(-1, keepdims=True)
    probabilities = exponentials / partition
    by_group = probabilities.reshape(len(tokens), layer.routing_groups, -1)
    order = np.argsort(-by_group, axis=-1, kind="stable")
    taken = np.argsort(order, axis=-1, kind="stable") < layer.top_k // layer.routing_groups
    taken = taken.reshape(probabilities.shape)
    balance = kernel.shape[-1] * (probabilities.mean(0) * taken.mean(0)).sum()
    return balance, np.square(np.log(partition)).mean()


def weighted_loss(layer, *calls, mask=None):
    """What calls of `layer` on each of these inputs add to the loss."""
    losses = [balancing_and_z_loss(layer, x, mask) for x in calls]
    return sum(
        layer.balance_loss_weight * balance + layer.z_loss_weight * z for balance, z in losses
    )


def compile_with_small_main_loss(model, weight=0.01):
    """For `fit` without learning. The main loss is kept small: the sum is rounded to float32."""
    model.compile(keras.optimizers.SGD(0.0), "mse", loss_weights=weight, metrics=["mse"])


def auxiliary_loss_of_fit(model, x, main_weight=0.01, **fit_arguments):
    """The loss that `fit` logs for each epoch, less the main loss."""
    compile_with_small_main_loss(model, main_weight)
    y = np.zeros(model.compute_output_shape(x.shape), "float32")
    history = model.fit(x, y, verbose=0, **{"batch_size": len(x), **fit_arguments}).history
    return np.array(history["loss"]) - main_weight * np.array(history["mse"])


def functional(function, shape=(T, D)):
    inputs = keras.Input(shape)
    return keras.Model(inputs, function(inputs))


def double(x):
    return keras.layers.Rescaling(2.0)(x)


class CallsTwice(keras.Model):
    """Calls a layer, or a model, on `x` and on `2 x`."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x, training=None):
        return self.layer(x, training=training) + self.layer(2 * x, training=training)

    def compute_output_shape(self, shape):
        return shape


def twice(layer):
    return functional(lambda x: keras.layers.add([layer(x), layer(double(x))]))


# Models around one layer, by how often they call it: once on their input x, or on x and on 2 x.
CALLED_ONCE = {
    "functional": functional,
    "Sequential": lambda layer: keras.Sequential([layer]),
    "nested": lambda layer: functional(functional(layer)),
    "nested in Sequential": lambda layer: keras.Sequential([keras.Sequential([layer])]),
}
CALLED_TWICE = {
    "functional": twice,
    "subclass": CallsTwice,
    "nested": lambda layer: functional(twice(layer)),
    "nested model called twice": lambda layer: twice(functional(layer)),
    "nested Sequential called twice": lambda layer: CallsTwice(keras.Sequential([layer])),
}


@pytest.mark.parametrize("build", CALLED_ONCE.values(), ids=CALLED_ONCE)
def test_counted_once_where_called_once(build):
    layer, x = moh_attention(**WEIGHTS), floats(B, T, D)
    found = auxiliary_loss_of_fit(build(layer), x)
    np.testing.assert_allclose(found, weighted_loss(layer, x), atol=1e-6)


@pytest.mark.parametrize("build", CALLED_TWICE.values(), ids=CALLED_TWICE)
def test_counted_twice_where_called_twice(build):
    layer, x = moh_attention(**WEIGHTS), floats(B, T, D)
    found = auxiliary_loss_of_fit(build(layer), x)
    np.testing.assert_allclose(found, weighted_loss(layer, x, 2 * x), atol=1e-6)


def test_one_loss_a_step_of_time_distributed():
    layer, x = moh_attention(**WEIGHTS), floats(B, 3, T, D)
    found = auxiliary_loss_of_fit(functional(keras.layers.TimeDistributed(layer), (3, T, D)), x)
    steps = [x[:, step] for step in range(3)]
    np.testing.assert_allclose(found, weighted_loss(layer, *steps), atol=1e-6)


def test_losses_of_several_layers_are_summed():
    first = moh_attention(**WEIGHTS)
    second = moh_attention(weights=2, balance_loss_weight=0.2, top_k=3)
    plain = moh_attention(router=None, num_shared_heads=None, top_k=None)
    x = floats(B, T, D)
    model = functional(lambda x: keras.layers.add([first(x), plain(x), second(double(x))]))
    expected = weighted_loss(first, x) + weighted_loss(second, 2 * x)
    np.testing.assert_allclose(auxiliary_loss_of_fit(model, x), expected, atol=1e-6)


def test_counted_once_in_each_of_two_models_that_share_the_layer():
    layer, x = moh_attention(**WEIGHTS), floats(B, T, D)
    once_model, twice_model = functional(layer), twice(layer)
    once, both = weighted_loss(layer, x), weighted_loss(layer, x, 2 * x)
    np.testing.assert_allclose(auxiliary_loss_of_fit(once_model, x), once, atol=1e-6)
    np.testing.assert_allclose(auxiliary_loss_of_fit(twice_model, x), both, atol=1e-6)
    np.testing.assert_allclose(auxiliary_loss_of_fit(once_model, x), once, atol=1e-6)


def test_counted_once_after_retracing():
    """A smaller last batch is traced anew, and so is a step after an evaluation."""
    layer, x = moh_attention(**WEIGHTS), floats(7, T, D)
    model = functional(layer)
    compile_with_small_main_loss(model)
    expected = (4 * weighted_loss(layer, x[:4]) + 3 * weighted_loss(layer, x[4:])) / 7
    arguments = {"batch_size": 4, "verbose": 0}
    for _ in range(2):
        logs = model.fit(x, 0 * x, epochs=2, shuffle=False, **arguments).history
        evaluated = model.evaluate(x, 0 * x, return_dict=True, **arguments)
        np.testing.assert_allclose(evaluated["loss"], 0.01 * evaluated["mse"], atol=1e-6)
        for loss, mse in zip(logs["loss"], logs["mse"], strict=True):
            np.testing.assert_allclose(loss - 0.01 * mse, expected, atol=1e-6)


def test_not_left_over_from_an_earlier_call():
    layer, x = moh_attention(**WEIGHTS), floats(B, T, D)
    for factor in (1, 2):
        layer(factor * x, training=True)
        np.testing.assert_allclose(
            [to_numpy(loss) for loss in layer.losses],
            [
                layer.balance_loss_weight * balancing_and_z_loss(layer, factor * x)[0],
                layer.z_loss_weight * balancing_and_z_loss(layer, factor * x)[1],
            ],
            atol=1e-6,
        )
    layer(x, training=False)
    assert layer.losses == []


def train_step(model, x):
    """The losses of a step of a training loop of one's own, and the gradients by the weights."""
    if keras.backend.backend() == "torch":
        model.zero_grad()
        model(x, training=True)
        sum(model.losses).backward()
        return model.losses, [variable.value.grad for variable in model.trainable_variables]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            model(x, training=True)
            loss = sum(model.losses)
        return model.losses, tape.gradient(loss, [v.value for v in model.trainable_variables])

    import jax

    def loss(trainable, non_trainable):
        _, _, losses = model.stateless_call(
            trainable, non_trainable, x, training=True, return_losses=True
        )
        return sum(losses), losses

    weights = [
        [v.value for v in of] for of in (model.trainable_variables, model.non_trainable_variables)
    ]
    (_, losses), by = jax.jit(jax.value_and_grad(loss, has_aux=True))(*weights)
    return losses, by


def test_counted_once_in_a_training_loop():
    layer, x = moh_attention(**WEIGHTS), floats(B, T, D)
    model = twice(layer)
    for _ in range(2):
        losses, by = train_step(model, x)
        assert len(losses) == 4
        np.testing.assert_allclose(
            sum(map(to_numpy, losses)), weighted_loss(layer, x, 2 * x), atol=1e-6
        )
        reached = {
            variable.path.removeprefix(f"{layer.name}/")
            for variable, gradient in zip(model.trainable_variables, by, strict=True)
            if gradient is not None and np.abs(to_numpy(gradient)).max() > 0
        }
        assert reached == {"router/routed_scores/kernel"}


@pytest.mark.parametrize(
    ("weights", "count"),
    [
        ({"balance_loss_weight": 0.0, "z_loss_weight": 0.0}, 0),
        ({"balance_loss_weight": 0.2, "z_loss_weight": 0.0}, 1),
        ({"balance_loss_weight": 0, "z_loss_weight": 0.1}, 1),
        ({"balance_loss_weight": 0.2, "z_loss_weight": 0.1}, 2),
    ],
)
def test_weight_0_adds_no_loss(weights, count):
    layer, x = moh_attention(**weights), floats(B, T, D)
    layer(x, training=True)
    assert len(layer.losses) == count
    np.testing.assert_allclose(sum(map(to_numpy, layer.losses)), weighted_loss(layer, x), atol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_shared_heads": 6, "top_k": 0},
        {"router": None, "num_shared_heads": None, "top_k": None, "z_loss_weight": 0.0},
    ],
    ids=["all heads shared", "no router"],
)
def test_no_choice_no_loss(arguments):
    layer = moh_attention(**{**WEIGHTS, **arguments})
    layer(floats(B, T, D), training=True)
    assert layer.losses == []


@pytest.mark.parametrize(("num_shared_heads", "top_k"), [(2, 1), (5, 1), (1, 5), (0, 1), (0, 6)])
def test_any_number_of_heads(num_shared_heads, top_k):
    layer = moh_attention(num_shared_heads=num_shared_heads, top_k=top_k, **WEIGHTS)
    x = floats(B, T, D)
    layer(x, training=True)
    balance, z = map(to_numpy, layer.losses)
    np.testing.assert_allclose(balance + z, weighted_loss(layer, x), atol=1e-6)
    if top_k == 6 - num_shared_heads:
        np.testing.assert_allclose(balance, BALANCE * top_k, atol=1e-6)


@pytest.mark.parametrize(
    ("num_shared_heads", "top_k", "routing_groups"), [(2, 2, 2), (0, 3, 3), (3, 3, 3)]
)
def test_groups_of_heads(num_shared_heads, top_k, routing_groups):
    """Also where the shared heads stand between the candidates, and in inputs of rank 4."""
    layer = moh_attention(
        num_shared_heads=num_shared_heads, top_k=top_k, routing_groups=routing_groups, **WEIGHTS
    )
    x = floats(B, 3, T, D)
    layer(x, training=True)
    balance, z = map(to_numpy, layer.losses)
    np.testing.assert_allclose(balance + z, weighted_loss(layer, x), atol=1e-6)


POLICIES = {
    "float32": "float32",
    "mixed_float16": "float32",
    "mixed_bfloat16": "float32",
    "float16": "float32",
    "bfloat16": "float32",
}


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [*POLICIES.items(), pytest.param("float64", "float64", marks=pytest.mark.float64)],
)
def test_dtype_of_losses(policy, dtype):
    layer, x = moh_attention(dtype=policy, **WEIGHTS), floats(B, T, D)
    layer.build(x.shape)

    def losses(x):
        layer(x, training=True)
        return layer.losses

    found = compiled(losses, ops.convert_to_tensor(x))
    assert [keras.backend.standardize_dtype(loss.dtype) for loss in found] == [dtype, dtype]
    atol = 1e-6 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(sum(map(to_numpy, found)), weighted_loss(layer, x), atol=atol)


def test_fit_in_mixed_precision():
    """With the optimizer's loss scaling. The main loss has float16 errors, so it is left out."""
    layer, x = moh_attention(dtype="mixed_float16", **WEIGHTS), floats(B, T, D)
    found = auxiliary_loss_of_fit(functional(layer), x, main_weight=0.0)
    np.testing.assert_allclose(found, weighted_loss(layer, x), atol=1e-6)


@pytest.mark.parametrize("lengths", [(2, 5), (0, 3), (0, 0)])
def test_only_valid_tokens_count(lengths):
    layer, x = moh_attention(**WEIGHTS), floats(B, T, D)
    mask = padding(*lengths, length=T)
    layer.build(x.shape)

    def loss(x, mask):
        layer(x, query_mask=mask, training=True)
        return sum(layer.losses)

    found = gradients(lambda x: loss(x, ops.convert_to_tensor(mask)), [x], layer)
    np.testing.assert_allclose(found.value, weighted_loss(layer, x, mask=mask), atol=1e-6)
    assert np.isfinite(found.weights["router/routed_scores/kernel"]).all()
    assert (found.inputs[0][~mask] == 0).all()
    assert (np.abs(found.inputs[0][mask]).max(-1, initial=0) > 0).all()


def test_only_valid_tokens_count_in_fit():
    """The mask comes from the embedding, without a word."""
    layer = moh_attention(**WEIGHTS)
    embedding = keras.layers.Embedding(13, D, mask_zero=True)
    model = keras.Sequential([embedding, layer, keras.layers.GlobalAveragePooling1D()])
    tokens = np.array([[5, 8, 2, 0, 0], [3, 12, 4, 1, 7], [9, 0, 0, 0, 0]])
    model.build(tokens.shape)
    found = auxiliary_loss_of_fit(model, tokens)
    x = to_numpy(embedding.embeddings)[tokens]
    np.testing.assert_allclose(found, weighted_loss(layer, x, mask=tokens != 0), atol=1e-6)


def test_empty_batch():
    layer = moh_attention(**WEIGHTS)
    layer.build((None, T, D))

    def loss(x):
        layer(x, training=True)
        return sum(layer.losses)

    found = gradients(loss, [np.zeros((0, T, D), "float32")], layer)
    assert found.value == 0
    assert all(np.isfinite(gradient).all() for gradient in found.weights.values())


@pytest.mark.parametrize(
    ("routing_groups", "heads", "balance"),
    # Of the candidates' probabilities 1/10, .. 4/10, those of the ones that every token takes.
    [(1, [0, 1, 4, 5], 3 + 4), (2, [0, 2, 3, 5], 2 + 4)],
)
def test_router_of_ones_own_has_a_balancing_loss(routing_groups, heads, balance):
    class LastHeads(keras_moh.Router):
        """Every token takes the shared heads and the last candidate or candidates of a group."""

        def call(self, inputs):
            ones = ops.ones_like(inputs[..., :1])
            probabilities = ones * ops.convert_to_tensor([0.1, 0.2, 0.3, 0.4])
            taken = ops.cast(ones, "int32") * ops.convert_to_tensor(heads, "int32")
            return keras_moh.Routing(taken, ops.cast(taken >= 0, "float32"), probabilities)

    router = LastHeads(6, num_shared_heads=2, top_k=2, routing_groups=routing_groups)
    layer = keras_moh.MoHAttention(6, 3, router=router, balance_loss_weight=BALANCE)
    layer(floats(B, T, D), training=True)
    assert [to_numpy(loss) for loss in layer.losses] == pytest.approx([BALANCE * 4 * balance / 10])
