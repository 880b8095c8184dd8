"""Accounts for every second of a run, from its journal and step records alone (docs/goodput.md).

`watching` reads a run, once or again and again. `lifecycle` walks the journal,
`process_time` splits the time of one training process, `time_account` holds the result.
"""
