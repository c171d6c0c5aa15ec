"""Runs a model: cache, attention, round, scheduler, engine."""
