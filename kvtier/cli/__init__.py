"""The command line. `main.py` is the entry point, `app.py` finds the command, `signals.py` ends it.

Each command has a file of its name; `copy.py` has `prewarm` and `snapshot`, too, `clear.py` has
`gc`, `migrate.py` belongs to `config`, and `top` has a folder. `serve` stays above its server by
`supervisor.py`. `console.py` is how they speak, `options.py` what several of them take,
`inspect.py` how they look at a stack's tiers. A copy chooses blocks and fills a tier by `sink.py`;
`plan` computes with `expectations.py`, and with `trace_simulation.py` where it has a trace. No file
here knows a kind of tier: what is done to a medium, its inspector does (`kvtier.inspect`).
"""
