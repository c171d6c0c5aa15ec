"""Measuring models: timing, workloads, and what presets are made from."""
