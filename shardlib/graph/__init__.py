"""Tracing to FX graphs, and functions from graph to graph."""
