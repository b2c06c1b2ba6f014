"""The kinds of the Kubernetes dialect that are kept in the store: templates, warm pools, quotas. Never a sandbox.

`storage` keeps documents by compare-and-swap and shows them with a status that is computed and never written;
`following` brings what other processes wrote; `podtemplates` and `pools` say what templates and pools mean,
`poolstatus` and `quotas` what became of them; `assembly` puts all of it together.
"""
