"""Retrofitted-recurrence Llama models (arXiv 2511.07384) for looped-spec."""
