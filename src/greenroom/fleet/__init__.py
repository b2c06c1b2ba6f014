"""The fleet as seen from outside of its nodes: one view in memory, fed by each node's stream of changes.

`view` and `warm` are pure and say what there is and which node has a warm member; `following` reads the streams.
"""
