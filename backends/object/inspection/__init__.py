"""What people do to object stores from outside.

- `inspector`: this kind's `Inspector`: what is there, and how often it was used
- `copies`: blocks read out of a store, to be copied or proved, and copies into it
- `store_access`: a store whose errors say what to do; deleting, `gc`, and places to measure in
- `checks`: what `doctor` looks at
"""
