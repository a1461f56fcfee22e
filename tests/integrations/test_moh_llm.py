"""`MoHLLM`: what it is made of, its losses, training, generation with the cache, files."""

import sys
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest

import keras_moh
from keras_moh.models import MoHLLM
from tests.helpers import to_numpy
from tests.integrations.models import adapters

TINY: dict[str, Any] = {
    "vocabulary_size": 11,
    "num_layers": 2,
    "hidden_size": 24,
    "num_heads": 6,
    "num_shared_heads": 2,
    "top_k": 2,
}


@pytest.fixture
def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    return MoHLLM(**TINY)


def inputs(tokens: np.ndarray) -> dict[str, np.ndarray]:
    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}


def test_the_papers_small_model(monkeypatch):
    """By default; its number of parameters is 186 million with a vocabulary of 2 ** 17, tied."""
    made: dict[str, Any] = {}

    class StopError(Exception):
        pass

    def backbone(**kwargs: Any) -> None:
        made.update(kwargs)
        raise StopError

    monkeypatch.setattr(keras_hub.models, "LlamaBackbone", backbone)
    for arguments, millions in (
        ({}, 186),
        ({"num_layers": 24, "hidden_size": 1536, "num_heads": 16}, 881),
    ):
        with pytest.raises(StopError):
            MoHLLM(2**17, **arguments)
        width, inner = made["hidden_dim"], made["intermediate_dim"]
        assert made["num_query_heads"] == made["num_key_value_heads"]
        layer = 4 * width**2 + 3 * width * inner
        assert round((made["num_layers"] * layer + 2**17 * width) / 1e6) == millions


def test_layers_and_losses(model):
    layers = adapters(model)
    assert [type(layer) for layer in layers] == [keras_moh.MoHLlamaAttention] * 2
    assert {type(layer.router) for layer in layers} == {keras_moh.TwoStageRouter}
    assert [(layer.num_shared_heads, layer.top_k) for layer in layers] == [(2, 2)] * 2
    assert {layer.balance_loss_weight for layer in layers} == {0.005}
    model(inputs(np.arange(10).reshape(2, 5)), training=True)
    assert len(model.losses) == 2
    kernels = [to_numpy(layer.router.routed_scores.kernel) for layer in layers]
    assert all(np.std(kernel) > 0.01 for kernel in kernels)


def test_shares_of_heads():
    layers = adapters(MoHLLM(**TINY | {"num_shared_heads": 0.5, "top_k": 1 / 3}))
    assert [layer.num_active_heads for layer in layers] == [5, 5]


def test_later_tokens_do_not_matter(model):
    tokens = np.random.default_rng(0).integers(0, 11, (2, 7))
    logits = to_numpy(model.predict_on_batch(inputs(tokens)))
    tokens[:, 4:] = (tokens[:, 4:] + 3) % 11
    changed = to_numpy(model.predict_on_batch(inputs(tokens)))
    np.testing.assert_allclose(logits[:, :4], changed[:, :4], atol=1e-5)
    assert np.abs(logits[:, 4:] - changed[:, 4:]).max() > 1e-3


def test_learns_generates_and_is_saved(model, tmp_path):
    """Numbers that count up: learned, and then generated with the cache as without."""
    generator = np.random.default_rng(0)
    tokens = (generator.integers(0, 11, (128, 1)) + np.arange(9)) % 11
    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        sampler="greedy",
    )
    losses = model.fit(
        inputs(tokens[:, :-1]), tokens[:, 1:], batch_size=32, epochs=15, verbose=0
    ).history["loss"]
    assert losses[-1] < 0.3 * losses[0]

    prompt, mask = np.zeros((2, 8), int), np.zeros((2, 8), bool)
    prompt[:, :3], mask[:, :3] = [[4, 5, 6], [9, 10, 0]], True
    generated = model.generate({"token_ids": prompt, "padding_mask": mask}, stop_token_ids=None)[
        "token_ids"
    ]
    without_cache = prompt.copy()
    for i in range(3, 8):
        logits = to_numpy(model.predict_on_batch(inputs(without_cache)))
        without_cache[:, i] = logits[:, i - 1].argmax(-1)
    np.testing.assert_array_equal(to_numpy(generated), without_cache)
    np.testing.assert_array_equal(without_cache, (prompt[:, :1] + np.arange(8)) % 11)

    model.compile(sampler="greedy")  # keras-hub's models load no optimizer's state, and warn
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert [type(layer) for layer in adapters(again)] == [keras_moh.MoHLlamaAttention] * 2
    np.testing.assert_allclose(
        again.predict_on_batch(inputs(tokens)), model.predict_on_batch(inputs(tokens)), atol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_size": 25}, "hidden_size.*multiple of num_heads=6.*25"),
        ({"num_key_value_heads": 4}, "num_heads.*multiple of num_key_value_heads=4.*6"),
        ({"num_layers": 0}, "num_layers.*positive integer.*0"),
        ({"top_k": 5}, "top_k=5 with 4 routed heads"),
        ({"intermediate_size": 0}, "intermediate_size.*positive integer.*0"),
    ],
)
def test_arguments_out_of_range_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        MoHLLM(**TINY | changes)


def test_keras_hub_is_needed(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(
        ImportError, match=r"MoHLLM needs keras-hub: `pip install keras-moh\[hub\]`"
    ):
        MoHLLM(**TINY)
