"""The node role: owns its sandboxes. Pools are kept warm here, claims are transactions here, TTLs run here.

`pool` and `refill` decide (pure), `journal` remembers, `keeper` does; `relay` carries the guests' traffic.
"""
