"""What people do to object stores from outside: `inspector.py` is this kind's `Inspector`.

`store_survey.py` reads what is there, `proofs.py` what records are worth, and `store_access.py`
opens a store whose errors say what to do. `checks.py` is what `doctor` looks at, `garbage.py` what
`gc` finds, `deletion.py` how objects go. `copy_source.py` and `filling.py` are for copies, and
`manifest_audit.py` compares what manifests say with what is there. `temporary_objects.py` has what
`bench` and `doctor` write.
"""
