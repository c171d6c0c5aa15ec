"""Rounds that are captured once per shape and replayed."""

from looped_spec.runtime.graphs.backends import CudaGraphs, GraphBackend, TracedGraphs
from looped_spec.runtime.graphs.choice import choose_graphs, graph_mode, linear_layout
from looped_spec.runtime.graphs.runner import GraphRunner, GraphStats
from looped_spec.runtime.graphs.shapes import padded_sizes, reachable_shapes

__all__ = [
    "CudaGraphs",
    "GraphBackend",
    "GraphRunner",
    "GraphStats",
    "TracedGraphs",
    "choose_graphs",
    "graph_mode",
    "linear_layout",
    "padded_sizes",
    "reachable_shapes",
]
