"""Manifests: what writers have added and removed, so that nobody has to ask for single objects.

manifest     the format: entries, and how a manifest is packed and unpacked
merge        the latest entry of every object
journal      reads and appends the manifests of a namespace, and joins them
block_rows   blocks in columns, as a tier takes them in
outbox       what a tier has added, removed and dropped, until the store knows it
reconcile    recorded entries against the blocks that a tier offers
"""
