"""Housekeeping: what a tier does in the store, off the thread that asks it questions.

keeper             the thread: when it begins, what it does in one round, how it ends
store_work         the work: recording, looking at what others did, audits
schedule           when what is due
keeper_limits      what it must know of the settings
read_only_keeper   the keeper of a tier with `write: never`
updates            what a keeper tells its tier, a little at a time
audit              a listing of everything against what is recorded
foreign_blocks     blocks of other namespaces: how many bytes, and which are the oldest
tombstones         objects that are being deleted
use_counts         how often blocks were used, by all servers together
empty_namespaces   removes what describes namespaces without blocks
background_errors  errors that the thread survives, each logged once
gc                 collects garbage without a server (`kvtier gc`)
"""
