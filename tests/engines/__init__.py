"""Real vLLM engines for tests: each in a process of its own (`hosts/`), told what to do."""
