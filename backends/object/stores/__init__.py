"""Object stores: one interface, two implementations, and wrappers that each add one behaviour.

`open_store` builds what a tier uses: an S3 bucket or a folder, behind a circuit breaker, behind
retries.

    store             the interface `Store` and its guarantees; names and limits of listings
    errors            everything that a store raises
    s3_store          an S3-compatible bucket (the requests are in `client/`)
    file_store        a folder; folder_listing lists it
    wrapper           base of all wrappers
    retry             bounded retries, and a pause for all when the store asks for one
    circuit_breaker   leaves an unwell store alone
    revocable         can be taken away while other threads use it
    read_only         drops writes
    open_store        from a url and settings to a store
"""
