"""A tiny Nanbeige checkpoint, bundled as `demo:nanbeige`, and how it was trained."""
