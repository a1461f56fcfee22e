"""keras-hub's models, if they are there: keras-hub is optional, and slow to import."""

from __future__ import annotations

from typing import Any


def keras_hub_models(purpose: str) -> Any:
    """The module `keras_hub.models`.

    Raises:
        ImportError: if keras-hub is not installed; it names the purpose.
    """
    try:
        from keras_hub import models
    except ImportError as error:
        raise ImportError(f"{purpose} needs keras-hub: `pip install keras-moh[hub]`") from error
    return models
