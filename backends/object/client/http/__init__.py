"""HTTP/1.1 over kept connections, with bodies that are read straight into the caller's memory.

endpoint          the address of a server, and how a bucket is named in a request
name_resolver     host names, looked up with a limit to the wait
proxy             HTTP proxies, by the variables that boto3 reads
tls               trusted authorities, and the handshake
sockets           plain and TLS sockets whose waits are bounded; connecting; what errors mean
connection        one connection: a request out, its response in
connection_pool   kept connections to one address
"""
