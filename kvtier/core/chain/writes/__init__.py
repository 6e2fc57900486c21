"""The way down: blocks written from each tier into the next lower one, behind the engine.

- `cascade`: what each step of the engine starts to write, by write policy and admission.
- `write_links`: what waits and what is under way between two tiers.
- `catch_up`: after a restart, what upper tiers have and lower ones lack.
"""
