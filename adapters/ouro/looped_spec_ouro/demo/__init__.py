"""A tiny Ouro checkpoint, trained by `train.py` beside it and bundled as `demo:ouro`."""
