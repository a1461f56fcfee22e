"""Routers, which choose the heads of every token, and the losses that keep them balanced."""

from keras_moh.routing.balancing import load_balancing_loss, router_z_loss
from keras_moh.routing.routers import QueryNormRouter, Router, TwoStageRouter
from keras_moh.routing.routing import Routing, all_heads, routing_dtype, routing_spec

__all__ = [
    "QueryNormRouter",
    "Router",
    "Routing",
    "TwoStageRouter",
    "all_heads",
    "load_balancing_loss",
    "router_z_loss",
    "routing_dtype",
    "routing_spec",
]
