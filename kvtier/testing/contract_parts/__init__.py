"""The parts of `kvtier.testing.contract.TierContract`, which a backend's author subclasses whole.

- `catalogue`, `pins`: what the `Tier` knows, reserves, commits, pins and drops.
- `moves`: what a `Handler` owes the threads of the mover.
- `medium`: the bytes: transfers, outcomes, room, sharing.
- `restarts`: what outlives a process.
- `inspection`: what the `Inspector` shows of it.
"""
