"""The store: templates, pools, node membership and API keys; never a sandbox."""
