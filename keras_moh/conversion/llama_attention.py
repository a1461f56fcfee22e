"""The adapter of keras-hub's `LlamaAttention`, of Llama, Llama 3, SmolLM2 and others."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import keras
from keras import ops

from keras_moh.conversion.adapter import Adapter, Names, projections
from keras_moh.errors import boolean, number_in
from keras_moh.rotary_embedding import RotaryEmbedding


@keras.saving.register_keras_serializable(package="keras_moh")
class LlamaRotaryEmbedding(RotaryEmbedding):
    r"""Rotary embedding as of Llama 3.1, which slows the long waves down.

    A frequency $\omega$ that turns $n = N \omega / 2 \pi$ times in a sequence of the length `N` of
    the pretraining becomes

    $$ (1 - s)\, \omega / f + s\, \omega, \quad
       s = \mathrm{clip}\!\left(\frac{n - l}{h - l}, 0, 1\right) $$

    with the factors `f`, `l` and `h` of the arguments: fast waves stay, slow ones are `f` times as
    slow.

    Args:
        frequency_adjustment_factor: The factor `f`.
        low_freq_factor: Number `l` of turns up to which a wave is slow.
        high_freq_factor: Number `h` of turns from which on it is fast.
        pretraining_sequence_length: The length `N`.
        **kwargs: Arguments of `RotaryEmbedding`.

    Example:
    >>> import numpy as np
    >>> from keras_moh.conversion import LlamaRotaryEmbedding
    >>> rotary = LlamaRotaryEmbedding(8.0, 1.0, 4.0, 8192, max_wavelength=500000)
    >>> tuple(rotary(np.ones((1, 3, 2, 4), "float32")).shape)
    (1, 3, 2, 4)
    """

    def __init__(
        self,
        frequency_adjustment_factor: float,
        low_freq_factor: float,
        high_freq_factor: float,
        pretraining_sequence_length: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.frequency_adjustment_factor = number_in(
            "frequency_adjustment_factor", frequency_adjustment_factor, 1
        )
        self.low_freq_factor = number_in("low_freq_factor", low_freq_factor, 0)
        self.high_freq_factor = number_in("high_freq_factor", high_freq_factor, low_freq_factor)
        self.pretraining_sequence_length = number_in(
            "pretraining_sequence_length", pretraining_sequence_length, 1
        )

    def frequencies(self, width: int, dtype: str) -> Any:
        """The angles by which one position turns the pairs of features, `(width / 2,)`."""
        fast = super().frequencies(width, dtype)
        slow = fast / self.frequency_adjustment_factor
        turns = self.pretraining_sequence_length * fast / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        share = ops.clip((turns - self.low_freq_factor) / span, 0, 1)
        return (1 - share) * slow + share * fast

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "frequency_adjustment_factor": self.frequency_adjustment_factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "pretraining_sequence_length": self.pretraining_sequence_length,
        }


@keras.saving.register_keras_serializable(package="keras_moh")
class MoHLlamaAttention(Adapter):
    """`MoHAttention` in the place of keras-hub's `LlamaAttention`.

    `convert_to_moh` makes these. The call arguments are those of `LlamaAttention`, and
    `return_routing` of `MoHAttention`.

    Args:
        *args: Arguments of `MoHAttention`.
        always_causal: Whether every mask that the layer is given is causal, as in the decoders of
            keras-hub: what it may not see is then skipped, not masked. Defaults to `False`.
        **kwargs: Arguments of `MoHAttention`.

    Example:
    >>> import numpy as np, keras_moh
    >>> layer = keras_moh.MoHLlamaAttention(
    ...     num_heads=4, key_dim=2, num_key_value_heads=2, num_shared_heads=1, top_k=1,
    ...     router="query_norm", rotary_embedding=keras_moh.RotaryEmbedding(), use_bias=False,
    ... )
    >>> tuple(layer(np.ones((2, 3, 8), "float32")).shape)
    (2, 3, 8)
    """

    source = "keras_hub.src.models.llama.llama_attention.LlamaAttention"
    renamed: ClassVar[Names] = {"hidden_states": "query"}
    causal_in = frozenset({"keras_hub.src.models.llama.llama_decoder.LlamaTransformerDecoder"})

    def __init__(self, *args: Any, always_causal: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.always_causal = boolean("always_causal", always_causal)

    @classmethod
    def unsupported_reason(cls, layer: keras.Layer) -> str | None:
        dropout = cls.dropout_of(layer)
        if dropout:
            return (
                f"it has dropout={dropout}, of the heads' outputs and not of the scores: make the "
                "model with dropout=0"
            )
        return super().unsupported_reason(layer)

    @classmethod
    def dropout_of(cls, layer: keras.Layer) -> float:
        """The rate of the source's dropout."""
        return layer.dropout

    @classmethod
    def arguments_of(cls, layer: keras.Layer) -> dict[str, Any]:
        return decoder_arguments(layer) | {
            "num_heads": layer.num_query_heads,
            "num_key_value_heads": layer.num_key_value_heads,
            "kernel_initializer": layer.kernel_initializer,
            "rotary_embedding": _rotary_embedding(layer),
        }

    @classmethod
    def shapes_of(cls, layer: keras.Layer) -> tuple[tuple[int | None, ...], ...]:
        return super().shapes_of(layer)[:1]

    def build(self, hidden_states_shape: Any) -> None:  # type: ignore[override]
        """Create the weights for `hidden_states` of that shape."""
        super().build(hidden_states_shape)

    def call(  # type: ignore[override]
        self,
        hidden_states: Any,
        attention_mask: Any = None,
        cache: Any = None,
        cache_update_index: Any = None,
        training: bool | None = None,
        return_routing: bool = False,
    ) -> Any:
        """Attend; see `MoHAttention`."""
        return super().call(
            hidden_states,
            attention_mask=attention_mask,
            return_routing=return_routing,
            training=training,
            use_causal_mask=self.always_causal,
            cache=cache,
            cache_update_index=cache_update_index,
        )

    def compute_output_shape(  # type: ignore[override]
        self, hidden_states_shape: Any
    ) -> tuple[int | None, ...]:
        """The shape of the output: that of `hidden_states`."""
        return super().compute_output_shape(hidden_states_shape)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "always_causal": self.always_causal}


def decoder_arguments(layer: keras.Layer) -> dict[str, Any]:
    """The arguments of the adapter that the decoders' attention has in common."""
    return {
        "key_dim": projections(layer)[0].kernel.shape[-1],
        "use_bias": False,
    }


def _rotary_embedding(layer: keras.Layer) -> RotaryEmbedding:
    """That of a `LlamaAttention`; keras-hub's own layer cannot be made from its config."""
    common = {
        "max_wavelength": layer.rope_max_wavelength,
        "scaling_factor": layer.rope_position_scaling_factor,
        "dtype": layer.dtype_policy,
        "name": "rotary_embedding",
    }
    if layer.rope_low_freq_factor is None:
        return RotaryEmbedding(**common)
    return LlamaRotaryEmbedding(
        frequency_adjustment_factor=layer.rope_frequency_adjustment_factor,
        low_freq_factor=layer.rope_low_freq_factor,
        high_freq_factor=layer.rope_high_freq_factor,
        pretraining_sequence_length=layer.rope_pretraining_sequence_length,
        **common,
    )
