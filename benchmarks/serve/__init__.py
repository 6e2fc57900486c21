"""vLLM's own benchmark clients against servers."""
