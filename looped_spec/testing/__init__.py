"""For plugin authors and for our own tests: oracles and a toy model."""
