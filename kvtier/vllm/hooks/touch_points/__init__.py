"""The table of all that kvtier touches of vLLM without a promise, and its comparison with a vLLM.

- `point.py`: what an entry says
- `interfaces.py`, `offloading.py`, `engine.py`: the entries, by what is touched
- `table.py`: all of them
- `source_check.py`: looks for them in the sources of a vLLM, installed or in a wheel
"""
