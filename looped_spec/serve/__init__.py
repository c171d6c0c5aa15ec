"""The OpenAI-compatible server: an async front before one engine in a thread of its own."""
