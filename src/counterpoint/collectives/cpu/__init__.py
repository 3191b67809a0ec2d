"""Run calls on CPUs.

`transport.py` holds the channels, `channel.py` their threads and the call under way, `partitioned.py` one whose caller
works piece by piece.
"""
