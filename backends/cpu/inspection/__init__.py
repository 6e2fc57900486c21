"""What people do to CPU regions from outside: `inspector.py` is this kind's `Inspector`.

`checks.py` is what `doctor` looks at, `garbage.py` what `gc` finds, `filling.py` how a copy fills a
region, and `offline_locks.py` holds one that no engine uses.
"""
