"""Benchmarks that measure the real thing beside a baseline, in one run, and keep every row.

`restore` measures the VM engine, `claim` a running platform; `summaries` is the arithmetic, `report` the
conditions and the file. They return records and print nothing: showing them is the command line's work.
"""
