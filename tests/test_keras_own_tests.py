"""Keras's own tests of `MultiHeadAttention`, run against `MoHAttention(router=None)`.

They come with Keras, and so are always those of the version installed. They find the layer by the
name `layers.MultiHeadAttention`, which here stands for plain attention of this package.
"""

import functools
import types
from unittest import mock

import keras
import pytest
from keras.src.layers.attention import multi_head_attention_test as upstream

from keras_moh import MoHAttention

# Tests of what this layer has not, by name.
NOT_RUN = {
    "test_causal_only_skipped_for_subclass": "overrides the private `_compute_attention`",
    "test_compute_attention_combines_causal_and_explicit_mask_fused_fallback": (
        "calls the private `_compute_attention`"
    ),
    "test_compute_attention_combines_causal_and_explicit_mask_manual_path": (
        "calls the private `_compute_attention`"
    ),
    "test_flash_attention_with_errors": "tests the argument `flash_attention`",
    "test_initializer": "all of it with `use_gate`; see test_training.py",
    "test_lora": "all of it with `use_gate`; see test_training.py",
    "test_mha_constraints": "all of it with `use_gate`; see test_training.py",
}

# These test attention without a gate first, and then the same with one. They are run up to there.
RUN_UP_TO_THE_GATE = {"test_attention_axes_negative_indexing", "test_quantize_int8"}


class NoGateError(Exception):
    """Keras's argument `use_gate` was asked for."""


@keras.saving.register_keras_serializable("keras_moh_tests")
class MultiHeadAttention(MoHAttention):
    """Plain attention, with the arguments of Keras's layer in Keras's order."""

    def __init__(
        self,
        num_heads,
        key_dim,
        value_dim=None,
        dropout=0.0,
        use_bias=True,
        output_shape=None,
        attention_axes=None,
        sliding_window=None,
        use_gate=False,
        router=None,
        **kwargs,
    ):
        if use_gate:
            raise NoGateError
        super().__init__(
            num_heads,
            key_dim,
            value_dim=value_dim,
            dropout=dropout,
            use_bias=use_bias,
            output_shape=output_shape,
            attention_axes=attention_axes,
            sliding_window=sliding_window,
            router=router,
            **kwargs,
        )

    @property
    def _sliding_window(self):
        return self.sliding_window


LAYERS = types.SimpleNamespace(**{**vars(keras.layers), "MultiHeadAttention": MultiHeadAttention})


class KerasOwnTests(upstream.MultiHeadAttentionTest):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(upstream, "layers", LAYERS))

    def run_layer_test(self, layer_cls, init_kwargs, **kwargs):
        if not init_kwargs.get("use_gate"):
            super().run_layer_test(layer_cls, init_kwargs, **kwargs)


def up_to_the_gate(test):
    @functools.wraps(test)
    def until_then(self):
        with pytest.raises(NoGateError):
            test(self)

    return until_then


for name in NOT_RUN:
    setattr(KerasOwnTests, name, None)
for name in RUN_UP_TO_THE_GATE:
    setattr(KerasOwnTests, name, up_to_the_gate(getattr(upstream.MultiHeadAttentionTest, name)))


@pytest.mark.parametrize("name", NOT_RUN)
def test_what_is_not_run_would_fail(name):
    """Else it could be run: a new Keras may have changed it, or this layer gained something."""
    test = getattr(upstream.MultiHeadAttentionTest, name)
    result = type("NotRun", (KerasOwnTests,), {name: test})(name).run()
    assert result.testsRun == 1
    assert result.failures or result.errors
