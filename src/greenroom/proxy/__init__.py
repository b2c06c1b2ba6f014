"""The proxy role: Envoy as the entry for both planes, and the controller that configures it.

`controller` is the role's life. `resources`, `replies` and `routing.lua` are what Envoy is told; `nodes` learns
where the nodes' relays are; `files` and `envoy` keep the process fenced and ours; `admin` talks to it.
"""
