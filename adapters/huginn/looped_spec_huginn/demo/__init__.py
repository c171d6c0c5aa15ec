"""A tiny Huginn checkpoint, bundled as `demo:huginn`, and how it was trained."""
