"""The folder on disk: names, slabs, owners and the lock.

- `files`: the names in a folder, and the marks that keep owners alive.
- `folder`: slabs by namespace, their owners, and the byte budget.
- `retaining_slabs`: which slabs hold something retained.
- `slab_creation`: new slabs; `slab_file`: a slab's two files; `limits`: what the settings allow.
- `lock`: the one lock of a folder, for what concerns several processes.
- `namespace_diff`: why a model is not found in a folder that holds it.
"""
