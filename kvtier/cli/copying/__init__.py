"""Blocks on their way from a source into one tier: prewarm, snapshot, restore, export, import.

`targets.py` finds the tier that is to be filled, `selection.py` chooses blocks, `reader.py` reads
them. `sink.py` opens the tier and fills it at the speed of `pace.py`, `copies.py` does that
namespace by namespace, and `report.py` says what came of it. `pack_files.py` has the files of
export and import.
"""
