"""The api role: it speaks to clients in their dialect and to nodes and masters in ours."""
