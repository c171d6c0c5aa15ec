"""Pieces that several model families share; none of them knows an engine."""
