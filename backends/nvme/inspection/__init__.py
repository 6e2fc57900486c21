"""What people do to NVMe folders from outside: `inspector.py` is this kind's `Inspector`.

`checks.py` is what `doctor` looks at, `garbage.py` what `gc` finds, `filling.py` how a copy fills a
folder, and `offline_locks.py` holds what no engine uses.
"""
