"""How the bundled demo checkpoints are made: one trainer for all families, each with its recipe.

An adapter's `demo` package holds the recipe and the checkpoint; the texts are the user's.
"""
