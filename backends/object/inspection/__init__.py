"""What people do to object stores from outside.

- `inspector`: this kind's `Inspector`
- `store_survey`: what is there, and how often it was used
- `proofs`: what records are worth
- `store_access`: a store whose errors say what to do; deleting; places to measure in
- `garbage`: what `gc` finds
- `checks`: what `doctor` looks at
- `copies`: copies out of a store and into it
"""
