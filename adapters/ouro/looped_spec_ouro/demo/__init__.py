"""A tiny Ouro checkpoint, bundled as `demo:ouro`, and how it was trained."""
