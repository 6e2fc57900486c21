"""The S3 client: requests about one bucket and its objects, signed by botocore.

It knows nothing of blocks. `stores/s3_store.py` is built from it.

    http/               connections, and what goes over them
    s3_settings         how to reach a bucket
    credentials         botocore's chain of credentials, asked without blocking requests
    signer              signs requests, writes their heads, and finds the endpoint
    bucket_client       requests to one bucket
    status_errors       what a response that is not a success means
    listing             the query of a listing, and its pages
    xml_rows            S3's XML, parsed a little at a time
    deletes             deletes in bulk, or one by one where the store refuses that
    parallel_requests   several requests at once, for a caller that waits for all
    extra               modules of botocore, imported when they are needed
"""
