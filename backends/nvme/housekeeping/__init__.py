"""What an NVMe tier does on disk, off the scheduler's thread.

- `keeper`: the thread; `read_only_keeper` is its counterpart where nothing may be written.
- `slab_watch`: finds out what changed in the slabs of the folder.
- `updates`: what the keeper tells its tier.
- `problems`: errors of a folder, each logged once.
- `budget_shares`: how the engines of a folder divide its room.
- `idle_namespaces`: room taken from models that nobody serves now.
- `use_counts`: how often blocks were used, written into the tables.
"""
