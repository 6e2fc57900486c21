"""What commands share that look at a stack's tiers from outside, by `kvtier.inspect` alone.

`inspectors.py` opens the inspectors of a stack and joins what they find, `namespaces.py` finds the
namespace that a person means, `machine_checks.py` is what `doctor` checks beside tiers, and
`parallel.py` proves many blocks at once.
"""
