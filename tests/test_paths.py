"""Which implementation really ran in `fit`, `evaluate` and `predict`, and which one is chosen."""

from typing import Any

import keras
import numpy as np
import pytest

from keras_moh import implementations
from keras_moh.implementations import choose_implementation
from keras_moh.implementations.spec import AttentionSpec
from tests.paths import NAMES, SHAPES, assert_all_close, expected_of_model, train_and_predict
from tests.samples import D, floats, moh_attention

BACKEND = keras.backend.backend()
# The one on rows that each backend has, and which comes first.
ON_ROWS = {"torch": "torch_sdpa", "jax": "jax_xla", "tensorflow": "tensorflow_xla"}[BACKEND]
# Every implementation serves a layer of these.
SERVED_BY_ALL = {"num_key_value_heads": 2, "routing_groups": 2}


MODES: dict[str, dict[str, Any]] = {
    "graph": {"jit_compile": False},
    "jit": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}
# On PyTorch, jit_compile=True captures a graph (see test_paths_torch.py); JAX has no other.
UNUSABLE = {("torch", "jit"), ("jax", "graph")}
USABLE = {name: mode for name, mode in MODES.items() if (BACKEND, name) not in UNUSABLE}


def steps(mode: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    """Steps of changing batch and length; but where each shape is compiled anew, only one."""
    return SHAPES[:1] if mode.get("jit_compile") else SHAPES


@pytest.mark.parametrize("mode", USABLE.values(), ids=USABLE)
@pytest.mark.parametrize("name", NAMES)
def test_named_one_in_a_model(name: str, mode: dict[str, Any], ran: list[str]) -> None:
    layer = moh_attention(**SERVED_BY_ALL, implementation=name)
    shapes = steps(mode)
    seen, results = train_and_predict(layer, mode, ran, *shapes)
    assert seen == [{name}] * 3
    assert_all_close(results, expected_of_model(*shapes, **SERVED_BY_ALL))


@pytest.mark.usefixtures("always_worth_it")
@pytest.mark.parametrize("mode", USABLE.values(), ids=USABLE)
def test_chosen_one_in_a_model(mode: dict[str, Any], ran: list[str]) -> None:
    shapes = steps(mode)
    seen, results = train_and_predict(moh_attention(), mode, ran, *shapes)
    assert [ON_ROWS in names for names in seen] == [True] * 3
    # On PyTorch and JAX, Keras first builds a model of stand-ins without values.
    assert set().union(*seen) <= {ON_ROWS, "reference"}
    assert seen[1:] == [{ON_ROWS}] * 2
    assert_all_close(results, expected_of_model(*shapes))


@pytest.mark.usefixtures("always_worth_it")
def test_chosen_one_over_axes_of_unknown_lengths(ran: list[str]) -> None:
    """Inputs of rank 4, attended to over one axis of two that are unknown."""
    shapes = ((2, 3, 5), (1, 2, 4))
    seen, results = train_and_predict(moh_attention(attention_axes=2), {}, ran, *shapes)
    assert seen[1:] == [{ON_ROWS}] * 2
    assert_all_close(results, expected_of_model(*shapes, attention_axes=2))


@pytest.mark.usefixtures("always_worth_it")
def test_chosen_one_behind_an_embedding(ran: list[str]) -> None:
    """With a mask of its padding, whose length is unknown too."""
    results = []
    for implementation in (None, "reference"):
        embedding = keras.layers.Embedding(13, D, "normal", mask_zero=True)
        layer = moh_attention(implementation=implementation)
        tokens = keras.Input((None,), dtype="int32")
        output = keras.layers.GlobalAveragePooling1D()(layer(embedding(tokens)))
        model = keras.Model(tokens, output)
        embedding.embeddings.assign(floats(13, D))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        x = np.array([[5, 8, 2, 0, 0], [3, 12, 4, 1, 7], [9, 0, 0, 0, 0]])
        model.fit(x, np.zeros((3, D)), verbose=0)
        ran.clear()
        results.append([model.predict(x, verbose=0), model.predict(x[:2], verbose=0)])
        results[-1] += model.get_weights()
        assert set(ran) == {implementation or ON_ROWS}
    assert_all_close(*results)


# Where no head is skipped.
OF_ALL = "reference" if BACKEND == "jax" else "fused"
# Of a call that `compact` can serve.
GROUPS = {"num_key_value_heads": 2, "routing_groups": 2}


def large_spec(**changes: Any) -> AttentionSpec:
    """A call on a CPU, much of which may be left out."""
    return AttentionSpec(
        **{
            **{"batch": 1, "query_length": 4096, "key_length": 4096, "num_heads": 12},
            **{"num_key_value_heads": 12, "num_active_heads": 6, "routing_groups": 1},
            **{"key_dim": 64, "value_dim": 64, "dtype": "float32", "device": "cpu"},
            **{"is_traced": False, "mask_shape": None, "is_causal": False, "sliding_window": None},
            **{"dropout": 0.0, "return_attention_scores": False},
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, ON_ROWS),
        ({"is_causal": True}, ON_ROWS),
        ({"mask_shape": (1, 1, 4096, 4096)}, ON_ROWS),
        ({"query_length": 2, "key_length": 2}, OF_ALL),
        (
            {"query_length": 2, "key_length": 2, "is_traced": True},
            "fused" if BACKEND == "tensorflow" else "reference",
        ),
        ({**GROUPS, "query_length": 256, "key_length": 256}, "compact"),
        (GROUPS, "compact" if BACKEND == "torch" else ON_ROWS),
        ({**GROUPS, "mask_shape": (1, 1, 1, 4096)}, ON_ROWS),
        ({**GROUPS, "sliding_window": 99}, ON_ROWS),
        # A step of decoding.
        ({"query_length": 1, "key_length": 32768}, ON_ROWS),
        ({"query_length": 1, "key_length": 512}, "reference"),
        ({"query_length": 1, "key_length": 8192, "num_key_value_heads": 4}, "reference"),
        (
            {"query_length": 1, "key_length": 32768, "num_key_value_heads": 4},
            ON_ROWS if BACKEND == "torch" else "reference",
        ),
        ({"dropout": 0.1}, "reference"),
        ({"return_attention_scores": True}, "reference"),
        ({"mask_shape": (1, 12, 4096, 4096)}, "reference"),
    ],
    ids=str,
)
def test_choice_of_a_call(changes: dict[str, Any], name: str) -> None:
    chosen = choose_implementation(large_spec(**changes))
    assert chosen.__name__ == implementations.IMPLEMENTATIONS[name][1]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has unknown lengths")
def test_choice_of_unknown_lengths() -> None:
    """What is fitted and predicted with TensorFlow is of unknown batch and length."""
    spec = large_spec(batch=None, query_length=None, key_length=None)
    assert choose_implementation(spec).__name__.endswith("tensorflow_xla")
