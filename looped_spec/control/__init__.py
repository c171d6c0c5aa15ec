"""Which (K, d) next. Pure Python: no torch, no clock, no I/O."""
