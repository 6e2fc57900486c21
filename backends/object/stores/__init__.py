"""Object stores: one interface, two implementations, and wrappers that each add one behaviour.

`settings.open_for` builds what a tier uses: a bucket of any cloud or a folder, behind retries and a
circuit breaker.

- `store`: the interface `Store` and its guarantees; names and limits of listings
- `errors`: everything that a store raises, and what responses mean
- `bucket_store`: a bucket of any cloud, by obstore
- `clouds`: where a bucket is, and how it is reached
- `credentials`: those of AWS, by botocore's chain
- `reader`: GETs over plain HTTP, straight into memory
- `file_store`: a folder
- `wrapper`: base of all wrappers; a store that is only read, one that can be revoked
- `retry`: bounded retries, a shared pause, and a circuit breaker
"""
