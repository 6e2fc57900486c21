"""What people do to object stores from outside: `inspector.py` is this kind's `Inspector`.

`store_survey.py` reads what is there, `proofs.py` what records are worth, and `store_access.py`
opens a store whose errors say what to do, deletes, and has what `bench` and `doctor` write.
`checks.py` is what `doctor` looks at, `garbage.py` what `gc` finds, `copies.py` is for copies.
"""
