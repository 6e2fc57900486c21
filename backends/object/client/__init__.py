"""The S3 client: HTTP/1.1 over kept connections, signed by botocore.

It knows requests and responses and nothing of blocks. `stores/s3_store.py` is built from it.

    endpoint            the address of a server, and how a bucket is named in a request
    sockets             plain and TLS sockets whose waits are bounded; connecting; what errors mean
    tls                 trusted authorities, and the handshake
    name_resolver       host names, looked up with a limit to the wait
    proxy               HTTP proxies, by the variables that boto3 reads
    http_connection     one connection: a request out, its response in
    connection_pool     kept connections to one address
    credentials         botocore's chain of credentials, asked without blocking requests
    signer              signs requests, writes their heads, and finds the endpoint
    s3_settings         how to reach a bucket
    bucket_client       requests to one bucket
    status_errors       what a response that is not a success means
    listing             the query of a listing, and its pages
    xml_rows            S3's XML, parsed a little at a time
    deletes             deletes in bulk, or one by one where the store refuses that
    parallel_requests   several requests at once, for a caller that waits for all
"""
