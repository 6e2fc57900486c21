"""Real vLLM engines for tests: each in a process of its own, told what to do."""
