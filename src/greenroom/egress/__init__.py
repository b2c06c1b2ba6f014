"""The way out of sandboxes: a process beside each node that dials what their rules allow, and answers their DNS.

It is a process of its own, without any privilege, because it reads what hostile guests send, and because bulk data
must not delay the node's event loop. The node gives it sockets that lie in the sandboxes' namespaces; what it dials,
it dials from the host's. `service` is its life, `boxes` one sandbox, `connections` one connection; `rules`,
`naming`, `dns` and `limits` decide and know no I/O.
"""
