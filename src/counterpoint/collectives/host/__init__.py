"""Let the ranks of one host meet, compare their calls, and notice each other's failures; CPU and GPU calls both use it.

`group.py` uses the torch process group; `shared_memory.py` makes memory that all ranks map, and lays out a rank's
status in it; `announce.py` compares the calls of the ranks; `watchdog.py` waits for peers, and finds out why one does
not come.
"""
