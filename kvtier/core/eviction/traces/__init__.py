"""Request traces, replayed against a policy.

- `trace`: reads a trace from a file.
- `replay`: what a tier of so many blocks would have served.
"""
