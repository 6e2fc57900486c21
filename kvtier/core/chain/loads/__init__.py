"""The way up: blocks of lower tiers into host memory, for requests that the engine serves.

- `promises`: the room that a lookup has promised to a request.
- `load_starter`: begins the loads of a request's blocks that are not in host memory.
- `promotion`: the transfers from lower tiers into host memory.
- `direct_reads`: loads past host memory, straight from files.
- `embedded_loads`: loads of callers that have no request, as the Python API has.
"""
