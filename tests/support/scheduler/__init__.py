"""What vLLM's scheduler asks and does, played."""
